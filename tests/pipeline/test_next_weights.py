"""Newer weights are fetched while the engine samples; only the newest are loaded."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from buffer.control.control import Mode
from buffer.rollouts.rollout import PolicyVersion
from buffer.weights.shared_folder import FolderReceiver
from buffer.weights.transport import PublishedWeights
from tests.pipeline.yard import FIRST, LINEAGE, SLOW_S, Yard, versions


def test_a_worker_samples_while_it_fetches_obeys_pauses_and_loads_only_the_newest_version(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Version 1 takes long to fetch, is deleted, and followed by three that the worker misses."""
    fetching, gate = threading.Event(), threading.Event()
    fetched: list[str] = []
    fetch = FolderReceiver.fetch

    def fetch_slowly(self: FolderReceiver, published: PublishedWeights) -> Path:
        fetched.append(Path(published.address).name)
        if fetched == ["weights-1"]:
            fetching.set()
            assert gate.wait(400)
        return fetch(self, published)

    monkeypatch.setattr(FolderReceiver, "fetch", fetch_slowly)
    newest = PolicyVersion(LINEAGE, 4)
    first = yard.enqueue(1, (150, 150))

    async def scenario() -> list[str]:
        async with yard.working(yard.worker(token_s=SLOW_S)) as engine:
            await yard.until_generating(engine, 2)
            await yard.receipts(yard.control(Mode.KEEP))
            yard.publish(1)
            yard.control(Mode.RUN)
            await yard.until(fetching.is_set)
            # not frozen: what runs ends under the old weights, and a pause is carried out
            await yard.until_places(completed=1)
            await yard.receipts(yard.control(Mode.DRAIN))
            yard.control(Mode.RUN)
            second = yard.enqueue(1)
            for version in (2, 3, 4):
                yard.publish(version)
            await asyncio.sleep(0.3)
            assert yard.places() == {"completed": 1, "waiting": 1}
            assert engine.version() == FIRST
            shutil.rmtree(yard.folder / "weights-1")
            gate.set()
            await yard.until_places(completed=2)
            assert engine.version() == newest
            return second

    second = asyncio.run(scenario())
    assert fetched == ["weights-1", "weights-4"]
    assert "refused" not in caplog.text
    for gids, weights in ((first, FIRST), (second, newest)):
        stamps = [stamp for gid in gids for s in yard.group(gid).states for stamp in versions(s)]
        assert set(stamps) == {weights}
    yard.check()
