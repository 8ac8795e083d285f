"""The janitor: what one sweep does, how much of it, and that dying in it costs nothing (I1, I11,
I13).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from buffer.errors import LostRun
from buffer.ids import group_id
from buffer.janitor import Swept
from buffer.maintenance.remove_run import remove_run
from buffer.redis.bulk_io import Command
from buffer.redis.scripts import Script, library
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights.copies import CopySender
from buffer.weights.redis_chunks import VersionStore
from tests.buffer.faulty_store import Died, FaultyStore
from tests.buffer.scene import FIRST, Scene
from tests.buffer.whole_story import save_weights, tell_a_whole_story

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


OPENING = {"create_run", "regenerate", "register", "producer_open", "trainer_open", "set_limits"}
"""They say themselves that there is no run, or make one."""


@pytest.fixture
def last_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Command]:
    made: dict[str, Command] = {}
    command = Script.command

    def recorded(self: Script, *parts: Any) -> Command:
        made[self.name] = command(self, *parts)
        return made[self.name]

    monkeypatch.setattr(Script, "command", recorded)
    return made


@pytest.mark.parametrize("is_over", [True, False])
def test_a_call_of_any_script_for_a_removed_run_changes_nothing_and_says_so(
    make_scene: Callable[..., Scene], last_calls: dict[str, Command], tmp_path: Path, is_over: bool
) -> None:
    scene = make_scene(max_tries=2, on_straggler="retry", order="fifo")
    tell_a_whole_story(scene, tmp_path)
    scene.run.store.call("sync", scene.keys.slots(), {})
    store, keys = scene.run.store, scene.keys
    if is_over:
        remove_run(store, keys)
    else:
        store.ask("test", "HSET", keys.meta, "schema", "removing")
    before = scene.dump()
    writing = {name for name, script in library().items() if script.header.writes}
    # while it is removed, only `regenerate` may go on with it
    refused = writing - (OPENING if is_over else {"regenerate"})
    for name in (OPENING - {"create_run", "regenerate"}) if is_over else ():
        assert store.client.execute_command(*last_calls[name])[0] in (b"NO_RUN", b"LOST")
    for name in sorted(refused):
        call = partial(store.client.execute_command, *last_calls[name])
        with pytest.raises(LostRun, match=f"removed.*{name}: there is no {re.escape(keys.meta)}"):
            store.retrying(name, call)
    assert scene.dump() == before
    with pytest.raises(LostRun):
        CopySender(VersionStore(store, keys), tmp_path).write(FIRST, save_weights)
    assert scene.dump().items() <= before.items(), "an older attempt is deleted first"


def test_weights_of_a_run_that_is_removed_while_they_are_stored_leave_nothing(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, send = scene.run.store, scene.run.store.send

    def remove(what: str, *given: Any, **options: Any) -> Any:
        if what == "weights":
            remove_run(store, scene.keys)
        return send(what, *given, **options)

    monkeypatch.setattr(store, "send", remove)
    with pytest.raises(LostRun):
        CopySender(VersionStore(store, scene.keys), tmp_path).write(FIRST, save_weights)
    assert scene.dump() == {}
