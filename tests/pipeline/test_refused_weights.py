"""Workers cannot load the published weights: the trainer logs it at once, and does not wait forever."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from buffer.errors import WeightsRefused
from buffer.model.manifest import NotReady
from consumer.handle import wait_rules
from consumer.handle.rollout_consumer import RolloutConsumer
from tests.pipeline.yard import TASK, Yard


def spoil(folder: Path) -> None:
    """Change a file without its size, which only a reader of all bytes notices."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_trainer_learns_at_once_that_workers_refuse_its_weights(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = RolloutConsumer(yard.run, prefetch_bytes=0, nonce=yard.trainer)
    consumer.lineage = "l1"
    reasons: list[str] = []

    def wait(reason: NotReady) -> None:
        reasons.append(str(reason))

    def train() -> None:
        folder, checksum = yard.write_weights(1)
        spoil(folder)
        consumer.publish_weights(1, str(folder), checksum)
        yard.enqueue(3)
        with pytest.raises(TimeoutError, match="1 of 1 workers cannot load the weights l1:1"):
            consumer.take_batch(1, {TASK: 3}, waiting=wait, deadline_s=3.0)
        with monkeypatch.context() as patch:
            patch.setattr(wait_rules, "REFUSAL_S", 0.5)
            with pytest.raises(WeightsRefused, match=r"model\.safetensors differs") as refused:
                consumer.take_batch(1, {TASK: 3})
        assert "publish" in refused.value.hint
        folder, checksum = yard.write_weights(2)
        consumer.publish_weights(2, str(folder), checksum)
        assert len(consumer.take_batch(1, {TASK: 3}, deadline_s=400.0).groups) == 3
        assert yard.run.fleet.workers()[0].refusal == ""

    async def scenario() -> None:
        async with yard.working(yard.worker()):
            await asyncio.to_thread(train)

    with caplog.at_level(logging.ERROR, "rolloutmq.consumer"):
        asyncio.run(scenario())
    logged = [record.message for record in caplog.records if record.name == "rolloutmq.consumer"]
    assert len(logged) == 2  # once in each wait
    assert "w0: cannot use the weights" in logged[0]
    assert any("cannot load the weights l1:1" in reason for reason in reasons)
