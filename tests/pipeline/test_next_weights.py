from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from pathlib import Path

import pytest

from buffer.control.control import Mode
from buffer.errors import WeightsRefused
from buffer.manifest import NotReady
from buffer.weights.transport import PublishedWeights
from buffer.weights.transports import WeightsReceiver
from buffer.wire.rollout import PolicyVersion
from consumer.handle import wait_rules
from consumer.handle.rollout_consumer import RolloutConsumer
from tests.pipeline.yard import FIRST, LINEAGE, TASK, Yard, versions
from tests.waits import until


def gated_fetches(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> list[str]:
    """Let every fetch wait for `gate`; return the names of the folders that are fetched."""
    fetched: list[str] = []
    fetch = WeightsReceiver.fetch

    def fetch_slowly(self: WeightsReceiver, published: PublishedWeights) -> Path:
        fetched.append(Path(published.address).name)
        assert gate.wait(400)
        return fetch(self, published)

    monkeypatch.setattr(WeightsReceiver, "fetch", fetch_slowly)
    return fetched


def test_a_worker_samples_while_it_fetches_obeys_pauses_and_loads_only_the_newest_version(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Version 1 takes long to fetch, is deleted, and followed by three that the worker misses."""
    gate = threading.Event()
    fetched = gated_fetches(monkeypatch, gate)
    newest = PolicyVersion(LINEAGE, 4)
    first = yard.enqueue(1, (15, 15))

    async def scenario() -> list[str]:
        async with yard.working(yard.worker(held=True)) as engine:
            await yard.until_generating(engine, 2)
            await yard.receipts(yard.control(Mode.KEEP))
            yard.publish(1)
            yard.control(Mode.RUN)
            await yard.until(lambda: fetched == ["weights-1"])
            # not frozen: what runs ends under the old weights, and a pause is carried out
            await yard.until_engine(lambda: engine._frozen_s is None)
            engine.let_go()
            await yard.until_stages(completed=1)
            await yard.receipts(yard.control(Mode.DRAIN))
            yard.control(Mode.RUN)
            second = yard.enqueue(1)
            for version in (2, 3, 4):
                yard.publish(version)
            await yard.until_idle()
            assert yard.stages() == {"completed": 1, "waiting": 1}
            assert engine.version() == FIRST
            shutil.rmtree(yard.folder / "weights-1")
            gate.set()
            await yard.until_stages(completed=2)
            assert engine.version() == newest
            return second

    second = asyncio.run(scenario())
    assert fetched == ["weights-1", "weights-4"]
    assert "refused" not in caplog.text
    for gids, weights in ((first, FIRST), (second, newest)):
        stamps = [stamp for gid in gids for s in yard.group(gid).states for stamp in versions(s)]
        assert set(stamps) == {weights}
    yard.check()


@pytest.mark.parametrize("mode", [Mode.ABORT, Mode.DRAIN, Mode.KEEP])
async def test_a_pause_waits_for_no_fetch(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """While announced weights are fetched, workers claim and sample; the pause holds the switch."""
    gate = threading.Event()
    fetched = gated_fetches(monkeypatch, gate)
    async with yard.working(yard.worker()) as engine:
        announced = yard.announce(1)
        await yard.until(lambda: fetched == ["weights-1"])
        yard.enqueue(2)
        await yard.until_stages(completed=2)
        assert yard.run.receipts.silent(announced.epoch) == ["w0"]
        gate.set()
        await yard.receipts(announced)
        assert engine.version() == FIRST
        gate.clear()  # from here on, a fetch would not end
        await yard.receipts(yard.control(mode))
        yard.name(1, *yard.located(1))
        yard.control(Mode.RUN)
        yard.enqueue(1)
        await yard.until_stages(completed=3)
        assert engine.version() == PolicyVersion(LINEAGE, 1)
    assert fetched == ["weights-1"]
    yard.check()


# -- refused weights ------------------------------


def spoil(folder: Path) -> None:
    """Change a file without its size, which only a reader of all bytes notices."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


async def test_a_trainer_learns_at_once_that_workers_refuse_its_weights(
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
        until(lambda: any(worker.refusal for worker in yard.run.fleet.workers()), "a refusal")
        with pytest.raises(TimeoutError, match="1 of 1 workers cannot load the weights l1:1"):
            consumer.take_batch(1, {TASK: 3}, waiting=wait, deadline_s=1.0)
        with monkeypatch.context() as patch:
            patch.setattr(wait_rules, "REFUSAL_S", 0.5)
            with pytest.raises(WeightsRefused, match=r"model\.safetensors differs") as refused:
                consumer.take_batch(1, {TASK: 3})
        assert "publish" in refused.value.hint
        folder, checksum = yard.write_weights(2)
        consumer.publish_weights(2, str(folder), checksum)
        assert len(consumer.take_batch(1, {TASK: 3}, deadline_s=400.0).groups) == 3
        assert yard.run.fleet.workers()[0].refusal == ""

    with caplog.at_level(logging.ERROR, "rolloutmq.consumer"):
        async with yard.working(yard.worker()):
            await asyncio.to_thread(train)
    logged = [record.message for record in caplog.records if record.name == "rolloutmq.consumer"]
    assert len(logged) == 2  # once in each wait
    assert "w0: cannot use the weights" in logged[0]
    assert any("cannot load the weights l1:1" in reason for reason in reasons)
