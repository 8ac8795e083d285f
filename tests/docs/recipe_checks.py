"""Use what the recipes of CONTRIBUTING.md add. `test_contributing.py` runs this in a copy that has the changes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from buffer.config.assignments import parse_settings
from buffer.failure_text import cause_of
from buffer.redis.server.acl import acl_line
from buffer.run.settings import LiveSettings
from buffer.weights.copies import CopySender
from buffer.weights.transports import WeightsReceiver, open_versions
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion, RolloutState
from consumer.config.learner import LossConfig
from consumer.grpo.learner.losses import Samples, TokenColumns, load_objective
from producer_workers.datasets.open import open_dataset
from producer_workers.engines import build_engine
from producer_workers.judges.load import load_judge
from rolloutmq.config.load import validate_config
from tests.extensions.gateway.test_gateway_endpoint import Desk, at_desk
from tests.pipeline.conftest import make_yard, quick_looks
from tests.pipeline.yard import Yard
from tests.producer_workers.conftest import chat, tokenizer
from tests.producer_workers.recorder import Recorder

__all__ = ["chat", "make_yard", "quick_looks", "tokenizer"]


def config(**sections: Any) -> Any:
    sums = {"judge": "brief", "dataset": {"kind": "counting", "size": 3}}
    return validate_config({"run": {"name": "r"}, "tasks": {"sums": sums}, **sections}, "run.toml")


def test_a_loss() -> None:
    of_loss = LossConfig(objective="reinforce")
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ones = torch.ones(2)
    columns = TokenColumns(
        logprobs=logprobs,
        old_logprobs=torch.tensor([-1.5, -1.0]),
        rollout_logprobs=torch.tensor([-1.5, -1.0]),
        advantages=torch.tensor([1.0, -2.0]),
        entropy=ones,
        samples=Samples(ones, torch.zeros(2, dtype=torch.int64), torch.tensor([2.0])),
    )
    found: Any = load_objective(of_loss.objective)(columns, of_loss)
    torch.testing.assert_close(
        found.loss.detach(), torch.tensor([-np.exp(0.5), 2 * np.exp(-1.0)]).float()
    )
    found.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.count_nonzero() == 2


def test_a_judge_scores_a_group(make_yard: Callable[..., Yard]) -> None:
    yard = make_yard()

    async def scenario() -> None:
        states = [
            RolloutState(
                index=0, messages=[{"role": "user", "content": "?"}], prompt_ids=[1], ground_truth=9
            )
        ]
        (gid,) = yard.enqueue_states(states)
        async with yard.working(yard.worker(judge=load_judge("brief"))):
            await yard.until_stages(completed=1)
        assert yard.group(gid).scores.tolist() == [1.0]

    asyncio.run(scenario())


def test_a_kind_of_engine(make_yard: Callable[..., Yard], tmp_path: Path) -> None:
    yard = make_yard()
    section = config(engine={"kind": "echo"}).engine

    async def scenario() -> None:
        (gid,) = yard.enqueue(1, tokens=(5,))
        engine = build_engine(section, tmp_path, FIRST_WEIGHTS)
        async with yard.working(yard.worker(engine=engine)):
            await yard.until_stages(completed=1)
        assert yard.group(gid).response_ids.tolist() == [0, 1, 2, 0, 1]

    asyncio.run(scenario())


def test_a_column_of_a_judge_reaches_the_trainer(make_yard: Callable[..., Yard]) -> None:
    yard = make_yard()

    def judge(*, response: str, ground_truth: object = None, state: object = None) -> Any:
        return {"score": 1.0, "surprise": [0.5, 2.0]}

    async def scenario() -> None:
        (gid,) = yard.enqueue(1, tokens=(2, 2))
        async with yard.working(yard.worker(judge=judge)):
            await yard.until_stages(completed=1)
        assert yard.group(gid).optional_columns()["surprise"].tolist() == [0.5, 2.0, 0.5, 2.0]

    asyncio.run(scenario())


def test_a_kind_of_data_set(tmp_path: Path) -> None:
    rows = open_dataset(config().tasks["sums"].dataset, tmp_path)
    assert [rows.row(row).ground_truth for row in range(len(rows))] == [2, 4, 6]


def test_a_transport_of_weights(
    make_yard: Callable[..., Yard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTIC", str(tmp_path / "attic"))
    versions = open_versions("attic://run")
    versions.prepare()

    def save(folder: Path) -> None:
        save_file({"w": np.arange(5.0)}, folder / "model.safetensors")

    (tmp_path / "own").mkdir()
    published = CopySender(versions, tmp_path / "own").write(PolicyVersion("l1", 3), save)
    yard = make_yard()
    receiver = WeightsReceiver(yard.store, yard.run.keys, "attic://run")
    assert load_file(receiver.fetch(published) / "model.safetensors")["w"].tolist() == [
        0, 1, 2, 3, 4,
    ]  # fmt: skip
    receiver.close()


def test_a_dialect_of_the_gateway(chat: Any) -> None:
    engine = Recorder(chat, ["four"])

    async def scene(desk: Desk) -> None:
        root = desk.gateway.url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {desk.key}"}
        async with desk.http.post(
            f"{root}/plain", json={"question": "2 + 2?"}, headers=headers
        ) as reply:
            assert (await reply.json())["answer"].endswith("four")

    at_desk(chat, engine, scene, max_tokens=100)


def test_a_command_and_a_number_of_the_heartbeat(make_yard: Callable[..., Yard]) -> None:
    yard = make_yard()

    def rolloutmq(*words: str) -> str:
        at = ("--redis-url", yard.store.url)
        return subprocess.run(
            [sys.executable, "-m", "rolloutmq", *words, *at],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    async def scenario() -> None:
        async with yard.working(yard.worker()):
            yard.enqueue(1)
            await yard.until_stages(completed=1)
            record = yard.run.keys.worker("w0")
            await yard.until(
                lambda: b"threads=" in (yard.store.client.hget(record, "report") or b"")
            )
            run = ("--run", yard.run.name)
            (worker,) = json.loads(await asyncio.to_thread(rolloutmq, "workers", *run, "--json"))
            assert worker["threads"] >= 1
            assert "threads" in await asyncio.to_thread(rolloutmq, "workers", *run)
            assert "rolloutmq_worker_threads{" in await asyncio.to_thread(rolloutmq, "metrics")
            assert json.loads(await asyncio.to_thread(rolloutmq, "ages", *run, "--json")) == {
                "sums": 0
            }

    asyncio.run(scenario())


def test_a_limit_of_a_task_can_be_set_while_the_run_continues(
    make_yard: Callable[..., Yard],
) -> None:
    yard = make_yard(max_tries=1)

    async def scenario() -> None:
        async with yard.working(yard.worker()):
            yard.enqueue(1, tokens=(2, 2))
            await yard.until_stages(completed=1)
            yard.run.set(parse_settings(LiveSettings, ["tasks.sums.max_group_tokens=3"]))
            yard.enqueue(1, tokens=(2, 2))
            await yard.until_stages(completed=1, dead=1)

    asyncio.run(scenario())


def test_a_reason_of_dead_letters(make_yard: Callable[..., Yard]) -> None:
    yard = make_yard(max_tries=1)

    async def scenario() -> None:
        yard.enqueue_states([RolloutState(index=0, prompt_ids=[1, 2])])
        async with yard.working(yard.worker()):
            await yard.until_stages(dead=1)
        (letter,) = yard.run.dead_letters.newest()
        assert cause_of(letter.reason).startswith("EmptyPrompt")

    asyncio.run(scenario())


def test_a_key_in_redis(make_yard: Callable[..., Yard]) -> None:
    yard = make_yard()
    key = yard.run.keys.slots()["notes"]
    yard.store.client.hset(key, "author", "ann")
    assert yard.run.account.fsck().faults == []
    yard.store.client.hset(key, "author", "!")
    assert [fault for fault in yard.run.account.fsck().faults if "author" in str(fault)]
    assert key.rpartition(":")[2] in acl_line(yard.run.name, "worker", "secret")
