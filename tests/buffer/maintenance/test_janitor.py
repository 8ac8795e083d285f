"""The janitor: what one sweep does, how much of it, and that dying in it costs nothing (I1, I11,
I13).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import pytest

from buffer.errors import LostRun
from buffer.ids import group_id
from buffer.janitor import Swept
from buffer.redis.store import Store
from buffer.run.run import Run
from tests.buffer.faulty_store import Died, FaultyStore
from tests.buffer.scene import Scene

T = TypeVar("T")


def neglect(scene: Scene) -> Scene:
    """A run in which there is one thing of each kind to do; two of what grew old."""
    scene.open_trainer()
    scene.ready(0)
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.raw.hset(scene.keys.ledger("train"), "forgotten", 0)
    scene.ready(0, 0)
    scene.raw.hset(scene.keys.ledger("train"), "taken", 9)
    scene.enqueue(2)
    scene.claim(1, worker="w1")
    tired = scene.claim(1)[0]
    scene.raw.hset(scene.keys.group(tired.gid), "tries", scene.run.limits.max_tries)
    scene.worker("gone")
    scene.raw.zadd(scene.keys.workers, {"gone": 1})
    scene.expire_leases()
    return scene


def test_one_of_many_sweeps_only_where_nobody_has_a_moment_ago(scene: Scene) -> None:
    janitor = scene.run.janitor
    clock = scene.keys.clock
    lease_ms = scene.run.limits.lease_ms
    # by how much the last sweep is older; less than nothing where the server's clock went back
    # since
    for behind_ms, sweeps in ((0, False), (lease_ms, True), (-60_000, True)):
        scene.enqueue(1)
        scene.claim(9)
        scene.expire_leases()
        scene.raw.hset(clock, "swept_ms", int(scene.raw.hget(clock, "seen_ms")) - behind_ms)
        swept = janitor.sweep_in_turn()
        assert (swept.reaped + swept.buried > 0) == sweeps
        janitor.sweep()


def test_sweep_does_all_there_is_to_do_and_says_so(scene: Scene) -> None:
    swept = neglect(scene).run.janitor.sweep()
    # payloads: result and prompt of the archived group and of the two that are dropped
    assert swept == Swept(reaped=1, buried=1, gone_workers=1, expired=2, forgotten=1, freed=6)
    assert scene.run.janitor.sweep() == Swept()
    assert not scene.garbage()
    assert scene.stream("resume") == [group_id("math", 3)]


def test_sweep_is_bounded_and_says_that_there_is_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.janitor.GROUPS_PER_CALL", 1)
    monkeypatch.setattr("buffer.janitor.FREE_ROUNDS", 2)
    sweeps = [neglect(scene).run.janitor.sweep()]
    while sweeps[-1].has_more:
        sweeps.append(scene.run.janitor.sweep())
    done = [(s.reaped + s.buried, s.expired, s.freed) for s in sweeps]
    assert len(done) > 2
    assert [max(counts) for counts in zip(*done, strict=True)] <= [1, 2, 2]
    assert [sum(counts) for counts in zip(*done, strict=True)] == [2, 2, 6]


def test_sweep_spares_leases_after_an_outage_and_says_how_long(scene: Scene) -> None:
    neglect(scene).raw.hset(scene.keys.clock, "seen_ms", 1)
    swept = scene.run.janitor.sweep()
    assert swept.reaped == 0
    assert 0 < swept.grace_ms <= scene.run.limits.lease_ms


def test_janitor_of_a_run_that_was_replaced_touches_nothing(scene: Scene) -> None:
    neglect(scene).raw.hset(scene.keys.meta, "nonce", "another")
    before = scene.dump()
    with pytest.raises(LostRun, match="another run"):
        scene.run.janitor.sweep()
    scene.raw.delete(scene.keys.meta)
    assert scene.run.janitor.sweep() == Swept()
    assert {name: value for name, value in before.items() if name != "meta"} == scene.dump()


@pytest.fixture
def dying(store: Store) -> Iterator[FaultyStore]:
    opened = FaultyStore(store.url)
    yield opened
    opened.close()


@pytest.mark.parametrize("lives", range(1, 16))
def test_a_janitor_may_die_behind_every_step(scene: Scene, dying: FaultyStore, lives: int) -> None:
    steps = 13
    neglect(scene)
    victim = Run(dying, scene.name, scene.run.nonce, scene.run.limits)
    assert isinstance(victim.store, FaultyStore)
    victim.store.lives = lives
    died = True
    try:
        victim.janitor.sweep()
        died = False
    except Died:
        pass
    scene.run.janitor.sweep()
    assert scene.run.janitor.sweep() == Swept()
    assert (scene.counters()["leases_lost"], scene.counters()["expirations"]) == ("2", "2")
    assert (len(scene.stream("resume")), scene.raw.zcard(scene.keys.dead), scene.garbage()) == (
        1,
        1,
        set(),
    )
    assert died == (lives <= steps), "the last one says that this test knows every step"
