"""vLLM samples with LoRA adapters: what a trainer publishes is only the adapter, and versions per token stay true."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from buffer.rollout import PolicyVersion
from buffer.store import Store
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine, Generation, WeightsError
from tests.engines.adapter_run import AdapterRun
from tests.engines.conformance import LONG, PROMPT, TOLERANCE, generate, interrupt, sampling, worst_difference
from tests.engines.conftest import CPU_ENGINE, FIRST, Folders, Run
from tests.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

RANK, ALPHA = 4, 8
REDIS = {"weights_transport": "redis"}
FOLDER = {"weights_transport": "folder", "max_staleness": 1}
VERSIONS = [PolicyVersion("main", number) for number in (1, 2)]


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A random adapter of all projections of q and v, and beside it, in "merged", the model with it added."""
    folder.mkdir()
    weights, draw = load_file(model / "model.safetensors"), torch.Generator().manual_seed(seed)
    adapter: dict[str, torch.Tensor] = {}
    for name in [name for name in weights if name.endswith(("q_proj.weight", "v_proj.weight"))]:
        out, into = weights[name].shape
        low, high = (0.3 * torch.randn(shape, generator=draw) for shape in ((RANK, into), (out, RANK)))
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{stem}.lora_A.weight": low, f"{stem}.lora_B.weight": high}
        weights[name] = weights[name] + ALPHA / RANK * high @ low
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_bytes(orjson.dumps(config | {"target_modules": ["q_proj", "v_proj"]}))
    shutil.copytree(model, folder / "merged")
    save_file(weights, folder / "merged" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def adapters(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(seed), folders.first, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def engine(run: Run[None], folders: Folders) -> Iterator[Engine]:
    """One that samples with adapters."""
    engine = build_engine(CPU_ENGINE.model_copy(update={"max_lora_rank": 8}), folders.first, FIRST)
    run(engine.start())
    yield engine
    run(engine.shutdown())


@pytest.mark.parametrize("policy", [REDIS, FOLDER], ids=["redis", "folder"])
def test_every_token_of_a_run_was_sampled_with_the_adapter_that_its_stamp_names(
    engine: Engine,
    run: Run[None],
    folders: Folders,
    server_of: Callable[[str], Server],
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: dict[str, Any],
) -> None:
    """Trained here, published through the server or a folder, sampled with by vLLM, and trained on again."""
    store = Store(server_of("valkey").url, deadline_s=30.0)
    played = AdapterRun(store, run_name, tmp_path, folders.first, policy)
    run(played.play(engine, monkeypatch))
    store.close()
    assert played.worst() < TOLERANCE
    assert played.worst(version=0) > 0.1  # the first one changes nothing: these are the model's own logprobs
    if policy is REDIS:  # what a step is given was sampled by the weights before it, so trainer and engine agree
        assert played.versions() == [{0}, {1}, {2}, {3}]
        assert all(step["mismatch/abs_logprob"] < TOLERANCE for step in played.metrics())


def test_adapters_take_each_others_place_while_tokens_flow(
    engine: Engine, run: Run[Any], folders: Folders, adapters: list[Path]
) -> None:
    greedy = sampling(LONG, temperature=0.0)

    async def scenario() -> tuple[Generation, Generation, Generation, Generation]:
        base = await generate(engine, sampling(60, seed=3))
        await engine.load_weights(adapters[0], VERSIONS[0])
        with pytest.raises(WeightsError, match="holds no LoRA adapter"):
            await engine.load_weights(folders.second, VERSIONS[1])
        one = await generate(engine, sampling(60, seed=3))
        mixed = await interrupt(engine, greedy, lambda: engine.load_weights(adapters[1], VERSIONS[1]))
        cut = mixed.spans[-1].start
        prompt = np.concatenate([PROMPT, mixed.token_ids[:cut]])
        return base, one, mixed, await engine.generate("fresh", prompt, sampling(LONG - cut, temperature=0.0))

    base, one, mixed, fresh = run(scenario())
    assert worst_difference(folders.first, base, 1.0) < TOLERANCE
    assert worst_difference(adapters[0] / "merged", one, 1.0) < TOLERANCE
    assert worst_difference(folders.first, one, 1.0) > 0.1
    assert [(span.lineage, span.version) for span in mixed.spans] == VERSIONS
    assert sum(span.length for span in mixed.spans) == LONG
    assert np.array_equal(mixed.token_ids[mixed.spans[-1].start :], fresh.token_ids)
    assert engine.version() == VERSIONS[1]
    again = run(generate(engine, sampling(60, seed=3)))
    assert worst_difference(adapters[1] / "merged", again, 1.0) < TOLERANCE


def test_a_torn_or_foreign_adapter_leaves_the_one_that_runs(
    engine: Engine, run: Run[Any], adapters: list[Path], tmp_path: Path
) -> None:
    torn, foreign = (Path(shutil.copytree(adapters[1], tmp_path / name)) for name in ("torn", "foreign"))
    file = torn / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    tensors = load_file(foreign / "adapter_model.safetensors")
    save_file({name: tensor[:, :7].clone() for name, tensor in tensors.items()}, foreign / "adapter_model.safetensors")

    async def scenario() -> tuple[Generation, Generation]:
        await engine.load_weights(adapters[0], VERSIONS[0])
        before = await generate(engine, sampling(60, seed=5))
        for folder in (torn, foreign):
            with pytest.raises(WeightsError):
                await engine.load_weights(folder, VERSIONS[1])
        return before, await generate(engine, sampling(60, seed=5))

    before, after = run(scenario())
    assert np.array_equal(before.token_ids, after.token_ids)
    assert np.array_equal(before.logprobs, after.logprobs)
    assert engine.version() == VERSIONS[0]
