"""A reading whose connection breaks is made again as a whole, whoever makes it (I13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from buffer.maintenance.remove_run import remove_run
from buffer.redis.store import Store
from buffer.run import Run
from rolloutmq.views.run_view import read_run_view
from tests.buffer.scene import Scene
from tests.servers import Server

READS: dict[str, Callable[[Run], Any]] = {
    "progress": lambda run: run.read_progress(),
    "snapshot": lambda run: [task.ready for task in read_run_view(run).tasks],
    "workers": lambda run: [worker.id for worker in run.fleet.workers()],
    "holder": lambda run: run.control.holder("trainer").nonce,
    "removed": lambda run: remove_run(run.store, run.keys) > 20,
}
"""The last one removes the run."""


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_reading_is_made_again_when_its_connection_breaks(
    server: Server, redis_client: redis.Redis, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(server.url, deadline_s=20.0)
    scene = Scene(store, redis_client, run_name)
    scene.open_trainer()
    scene.ready(*[0] * 5)
    broken: list[str] = []
    pipeline: Any = redis.client.Pipeline
    execute = pipeline._execute_pipeline

    def break_once(self: Any, *words: Any, **named: Any) -> Any:
        if not broken:
            broken.append("now")
            raise redis.ConnectionError("cut")
        return execute(self, *words, **named)

    for name, read in READS.items():
        expected = name == "removed" or read(scene.run)
        broken.clear()
        with monkeypatch.context() as wire:
            wire.setattr(pipeline, "_execute_pipeline", break_once)
            assert read(scene.run) == expected, name
        assert broken, name
    store.close()
