"""A server at its maxmemory starts nothing new, ends what was begun, and loses nothing (I12)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import StoreFull
from buffer.redis.store import Store
from tests.buffer.ledger.test_memory import large_group
from tests.buffer.scene import LIMITS, Scene
from tests.servers import SAFE, OwnServer, raw_client

ROOM = 4 * 2**20
"""Bytes that the server has for payloads: about 24 groups of 165 KB."""

GROUPS = 60
BATCH = 8


@pytest.fixture(params=["valkey", "redis"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """Return a run on a server of its own with little memory; 60 of its groups are claimed."""
    server = OwnServer(request.param, tmp_path)
    server.start(*SAFE)
    store = Store(server.url, deadline_s=30.0)
    store.retrying("start", store.client.ping)
    raw: Any = raw_client(server.url)
    scene = Scene(store, raw, "full", LIMITS.model_copy(update={"stale_threshold": 1000}))
    scene.open_trainer()
    scene.enqueue(GROUPS)
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + ROOM)
    yield scene
    raw.close()
    store.close()
    server.kill()


def submit(scene: Scene, job: Any) -> bool:
    """As a worker does: where there is no room, the result is kept."""
    try:
        scene.run.buffer.submit("w0", job, large_group(job.gid, job.payload.size), 4)
    except StoreFull:
        return False
    return True


def fill(scene: Scene) -> tuple[list[Any], list[Any]]:
    """Hand in until there is no room: (what is in, what is held)."""
    jobs = scene.claim(GROUPS)
    assert len(jobs) == GROUPS
    scene.store.deadline_s = 0.0
    done = [job for job in jobs if submit(scene, job)]
    scene.store.deadline_s = 30.0
    held = [job for job in jobs if job not in done]
    assert BATCH <= len(done) < GROUPS
    return done, held


def test_nothing_new_is_started_and_refusals_do_not_wait(scene: Scene) -> None:
    done, held = fill(scene)
    scene.store.deadline_s = 3600.0
    scene.raw.config_set("maxmemory", 1)
    for start in (
        lambda: scene.enqueue(1),
        scene.claim,
        lambda: scene.run.jobs.requeue(done[0].gid),
    ):
        with pytest.raises(StoreFull, match=r"memory of .* is full"):
            start()
    scene.beat(held)
    assert scene.run.jobs.release("w0", held[0], "handback") == "waiting"
    assert scene.run.jobs.release("w0", held[1], "failed", "bad") == "waiting"
    assert scene.run.fleet.fence("w0") == len(held) - 2
    scene.pause()
    scene.check()


def test_all_begun_groups_are_submitted_as_the_trainer_frees_and_the_run_continues(
    scene: Scene,
) -> None:
    _, held = fill(scene)
    taken: list[str] = []
    step = 0
    while held or len(taken) < GROUPS:
        step += 1
        ready = scene.run.account.totals().tasks[0].completed
        taken += scene.take(step, strict=False, math=min(BATCH, ready)).gids
        scene.run.ledger.commit(scene.trainer, step, step)
        scene.run.janitor.sweep()
        scene.beat(held)
        scene.store.deadline_s = 0.0
        held = [job for job in held if not submit(scene, job)]
        scene.store.deadline_s = 30.0
    assert sorted(taken) == sorted({f"math-{draw:010d}" for draw in range(GROUPS)})
    scene.check()
    assert scene.run.memory.count().held == 0
    assert scene.enqueue(2).count == 2
    for job in scene.claim(2):
        assert submit(scene, job)
    assert len(scene.take(step + 1, math=2).gids) == 2
    scene.check()
