"""Tinker's own package against a small service that really trains: `make test-trainers`."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer.errors import ConfigError
from buffer.ids import group_id
from buffer.redis.store import Store
from buffer.run.open import wait_for_run
from buffer.weights.checksums import write_tensors
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status
from buffer.wire.sampling import SampleParams
from consumer.handle.step_log import StepLog
from producer_workers.config.engine import PythonConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import GenerationError, WeightsError
from rolloutmq.config.load import load_config
from tests.consumer.grpo.models.tiny import build_model
from tests.servers import Server
from tests.waits import until

tinker = pytest.importorskip("tinker")

from examples.trainers import tinker_engine, tinker_trainer  # noqa: E402

# the package leaves connections to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROOT = Path(__file__).parents[2]
PROMPT = np.arange(40, 46, dtype="<i4")
FIRST, NEXT = PolicyVersion("main", 0), PolicyVersion("main", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("tinker"))


@pytest.fixture(scope="module", autouse=True)
def service(model: Path) -> Iterator[None]:
    """Start the service in a process of its own, and let this one's clients use it."""
    port = model.parent / "port"
    command = [
        sys.executable, "-m", "tests.extensions.trainers.tinker_server", str(model), str(port),
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT)
    with pytest.MonkeyPatch.context() as patch:
        try:
            until(lambda: port.exists() and port.read_text() != "", "the service")
            patch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{port.read_text()}")
            patch.setenv("TINKER_API_KEY", "tml-test")
            patch.setenv("TINKER_TELEMETRY", "0")
            yield
        finally:
            process.kill()
            process.wait()
            gc.collect()  # while the marks above hold


ENGINE = PythonConfig(
    factory="examples.trainers.tinker_engine:TinkerEngine", options={"base_model": "tiny"}
)


async def group_of(engine: Any, **params: Any) -> RolloutGroup:
    states = []
    for index, tokens in enumerate((12, 5)):
        made = await engine.generate(
            f"a/{index}", PROMPT, SampleParams(max_tokens=tokens, **params)
        )
        state = RolloutState(index=index, prompt_ids=PROMPT, status=Status.COMPLETED)
        state.append(made.token_ids, made.logprobs, made.spans)
        state.reward = {"score": float(index == 0)}
        states.append(state)
    return RolloutGroup(group_id("math", 0), "math", states)


def logprobs_of(model: Path, response: Any) -> Any:
    ids = torch.tensor(np.concatenate([PROMPT, response])[None].astype("<i8"))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(input_ids=ids).logits[0, :-1]
    found = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[len(PROMPT) - 1 :, 0]
    return found.numpy()


def test_what_is_sampled_is_what_is_trained(model: Path, tmp_path: Path) -> None:
    """Token ids and logprobs are the model's, before and after an update of the weights."""

    async def scenario(client: Any) -> None:
        engine: Any = build_engine(ENGINE, model, FIRST)
        await engine.start()
        group = await group_of(engine)
        for state in group.states:
            expected = logprobs_of(model, state.response_ids)
            assert np.abs(state.logprobs - expected).max() < 1e-4
            assert [span.version for span in state.spans] == [0]
        data = list(tinker_trainer.datums([group], "grpo"))
        assert len(data) == 2
        losses = []
        for _ in range(4):
            output = client.forward_backward(data, "importance_sampling")
            client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
            losses.append(output.result().metrics["loss:sum"])
            if len(losses) == 1:
                assert tinker_trainer.measures(data, output.result())["mismatch/abs_logprob"] < 1e-4
        assert losses == sorted(losses, reverse=True)
        path = client.save_weights_for_sampler("next").result().path
        write_tensors(tmp_path / tinker_engine.SAMPLER, {}, {"path": path})
        await engine.load_weights(tmp_path, NEXT)
        newer = await group_of(engine, seed=3)
        assert {span.version for state in newer.states for span in state.spans} == {1}
        again = client.forward(list(tinker_trainer.datums([newer], "grpo")), "importance_sampling")
        data = list(tinker_trainer.datums([newer], "grpo"))
        assert tinker_trainer.measures(data, again.result())["mismatch/abs_logprob"] < 1e-4
        await engine.shutdown()

    with tinker.ServiceClient() as service:
        asyncio.run(scenario(service.create_lora_training_client("tiny").result()))


def test_a_request_ends_with_the_weights_that_it_began_with(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine: Any = build_engine(ENGINE, model, FIRST)
        await engine.start()
        long = SampleParams(max_tokens=400, stop_token_ids=[])
        running = asyncio.create_task(engine.generate("a/0", PROMPT, long))
        spared = asyncio.create_task(engine.generate("b/0", PROMPT, SampleParams(max_tokens=5)))
        await asyncio.sleep(0.2)
        await engine.pause("keep")
        waiting = asyncio.create_task(engine.generate("c/0", PROMPT, SampleParams(max_tokens=5)))
        await asyncio.sleep(1.0)
        assert not spared.done()
        await engine.abort_others({"b"})
        assert (await running).finish_reason == "abort"
        await engine.resume()
        assert (await spared).spans[0].version == 0
        assert len((await waiting).token_ids) <= 5
        with pytest.raises(WeightsError, match=str(tmp_path)):
            await engine.load_weights(tmp_path, NEXT)
        assert engine.version() == FIRST
        with pytest.raises(GenerationError, match="repetition_penalty"):
            await engine.generate("a/0", PROMPT, SampleParams(repetition_penalty=1.1))
        assert engine.unfinished() == 0
        await engine.shutdown()
        with pytest.raises(ConfigError, match="base_model"):
            build_engine(ENGINE.model_copy(update={"options": {}}), model, FIRST)

    asyncio.run(scenario())


JUDGE = """
def many_low(*, state, **given):
    return float((state.response_ids < 50).mean())
"""

CONFIG = Path(__file__).with_name("tinker.toml").read_text(encoding="utf-8")


def trainer_of(process: psutil.Process) -> psutil.Process | None:
    found = [child for child in process.children(recursive=True) if "train" in child.cmdline()]
    return found[0] if found else None


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_killed_trainer_continues_from_the_state_at_the_service(
    server: Server, run_name: str, model: Path, tmp_path: Path
) -> None:
    """All of it with real processes: producer, a worker that samples there, and the trainer."""
    problems = "".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(40))
    (tmp_path / "problems.jsonl").write_text(problems, encoding="utf-8")
    (tmp_path / "my_judge.py").write_text(JUDGE, encoding="utf-8")
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(name=run_name, folder=tmp_path, model=model), encoding="utf-8")
    config = load_config(file, [])
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"REDIS_URL": server.url, "PYTHONPATH": path}
    command = [sys.executable, "-m", "rolloutmq", "run", str(file)]
    store = Store(server.url)
    with (tmp_path / "log").open("w") as log:
        process = psutil.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        run = wait_for_run(store, run_name)
        until(lambda: run.ledger.steps()[1] >= 2, "a commit")
        trainer = trainer_of(process)
        assert trainer
        trainer.kill()
        assert process.wait(240) == 0, (tmp_path / "log").read_text(encoding="utf-8")[-3000:]
        assert run.account.fsck().clean
    finally:
        if process.is_running():
            process.send_signal(signal.SIGINT)
            process.wait(60)
        store.close()
    steps = StepLog(config.run.folder / "steps.jsonl")
    steps.read_new()
    assert [step.step for step in steps.steps] == list(range(1, 7))
    assert steps.trained_twice() == {}
    assert len({gid for step in steps.steps for gid in step.gids}) == 18
    # the optimizer at the service has seen each step once, also those before the kill
    assert steps.steps[-1].metrics["tinker/updates"] == 6
