"""The server loses what the trainer's checkpoint records.

It is restored, and nothing is trained twice (I6).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from buffer.errors import ConfigError, Fenced, LedgerError, LostRun
from buffer.ids import IMPORTED_FROM, group_id, new_nonce
from buffer.ledger.position import Position
from buffer.manifest import Manifest, NotReady
from buffer.redis.scripts import ScriptCall
from buffer.redis.store import Store
from buffer.wire.rollout import Status
from tests.buffer.checkpointing import Trainer
from tests.buffer.keyspace import payload_keys
from tests.buffer.scene import FIRST, Scene


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene(stale_threshold=100)


@pytest.fixture
def trainer(scene: Scene) -> Trainer:
    scene.open_producer()
    return Trainer(scene)


def gids(*draws: int) -> list[str]:
    return [group_id("math", draw) for draw in draws]


def stage(scene: Scene, draw: int) -> list[str]:
    return scene.run.account.stages("math", draw)


def test_nothing_is_written_where_nothing_is_lost(scene: Scene, trainer: Trainer) -> None:
    scene.ready(0, 0, 0)
    for step in (1, 2, 3):
        trainer.train(step)
    position = trainer.save(keep=1)
    before = scene.dump()
    assert not trainer.open(position).recovery
    after = scene.dump()
    # but for the new trainer
    assert {name for name in after if after[name] != before[name]} == {"control", "lineages"}


def test_a_batch_comes_back_as_it_was_when_its_bytes_are_there(
    scene: Scene, trainer: Trainer
) -> None:
    waiting, running, ready = gids(2, 1, 0)
    scene.enqueue(3)
    jobs = scene.claim(2)
    scene.submit(jobs[0])
    moment = trainer.now()
    scene.submit(jobs[1])
    scene.claim()
    # the bytes of the second group were there before its submit was lost
    payload = {key: value for key, value in trainer.now().items() if jobs[1].token in key}
    assert payload
    kept = trainer.train(1, math=2)
    trainer.save(keep=0)
    trainer.lose_all_since(moment | payload)
    assert [stage(scene, draw) for draw in (0, 1, 2)] == [["pool"], ["running"], ["waiting"]]

    opening = trainer.open()
    assert (opening.recovery.restored, opening.recovery.oldest) == (1, None)
    assert kept.gids == [ready, running]
    assert trainer.scene.run.ledger.manifest(1) == kept
    scene.check()
    assert scene.stream("fresh") == [waiting]
    assert scene.counters()["reasserted"] == "2"
    assert scene.raw.ttl(scene.keys.payload(running, jobs[1].token)) == -1
    # a checkpoint before it may still be opened, and is given the same batch
    trainer.open(Position())
    assert scene.take(1, math=2) == kept
    assert [scene.run.buffer.read(entry.payload).gid for entry in kept.entries] == kept.gids


def test_a_batch_without_its_bytes_is_archived_and_older_checkpoints_only_open_by_name(
    scene: Scene, trainer: Trainer
) -> None:
    scene.enqueue(4)
    job = scene.claim()[0]
    moment = trainer.now()
    scene.submit(job)
    for other in scene.claim(3):
        scene.submit(other)
    trainer.train(1)
    first = trainer.save(keep=0)
    trainer.train(2, math=2)
    position = trainer.save(keep=0)
    trainer.lose_all_since(moment)

    opening = trainer.open(position)
    assert (opening.taken, opening.committed, opening.freed) == (2, 2, 2)
    assert opening.recovery.oldest == 2
    assert [stage(scene, draw) for draw in range(4)] == [["archived"]] * 3 + [["waiting"]]
    assert scene.counters()["consumed"] == "3"
    scene.check()
    with pytest.raises(Fenced):
        scene.submit(job)
    # the batch of the older checkpoint is generated again, and only when asked for
    with pytest.raises(LedgerError, match="already freed"):
        trainer.open(first)
    trainer.open(first, regenerate=True)
    assert scene.run.ledger.steps() == (1, 1, 1)
    assert [stage(scene, draw) for draw in range(4)] == [["archived"], [], [], ["waiting"]]
    scene.check()
    assert scene.run.jobs.next_draw(scene.producer, "math") == 1
    assert scene.enqueue(3).count == 2
    assert scene.run.jobs.next_draw(scene.producer, "math") == 4
    scene.check()
    assert scene.stream("fresh") == gids(3, 1, 2)


def test_groups_that_came_back_to_life_anywhere_are_archived(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(max_tries=1, on_straggler="retry")
    scene.open_producer()
    trainer = Trainer(scene)
    scene.enqueue(8)
    ready, expired, aborted, dead, running, partial, _ = jobs = scene.claim(7)
    scene.submit(ready)
    scene.submit(expired)
    scene.raw.zadd(
        scene.keys.pool("math", "completed"),
        {f"{scene.record(expired.gid)['arrival']}:{expired.gid}": -9},
    )
    scene.run.buffer.refresh_staleness("math")
    scene.submit(aborted, status=Status.ABORTED)
    scene.submit(partial, status=Status.ABORTED)
    scene.run.jobs.release("w0", dead, "failed")
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000, limit=1)
    moment = trainer.now()
    stages = [stage(scene, draw) for draw in range(8)]
    assert stages == [
        ["pool"], ["pool"], ["waiting"], ["dead"], ["running"], ["pool"], ["running"], ["waiting"],
    ]  # fmt: skip

    trained = [job.gid for job in jobs] + gids(7, 9, 12)
    trainer.position.add(
        Manifest.parse(1, ["step=1", *(f"{gid} lost 1 9 - 2 -" for gid in trained)])
    )
    trainer.position.forget(1)
    trainer.position.cursors = {"math": 15}
    trainer.lose_all_since(moment)
    opening = trainer.open()
    assert (opening.recovery.changed, opening.recovery.lost) == (10, 5)
    assert [stage(scene, draw) for draw in (*range(8), 9, 12)] == [["archived"]] * 10
    assert [stage(scene, draw) for draw in (8, 10, 11, 13)] == [[]] * 4
    assert scene.run.account.totals().tasks[0].stages == dict.fromkeys(stages_of(scene), 0) | {
        "archived": 10
    }
    assert list(scene.beat([running]).lost) == [running]
    assert scene.held() == []
    with pytest.raises(Fenced):
        scene.submit(running)
    scene.check()
    # the cursor goes over what is there, and draws the rest
    assert scene.enqueue(6).count == 4
    assert scene.stream("fresh") == gids(8, 10, 11, 13)
    scene.check()
    scene.run.janitor.sweep()
    pinned = {key for key in payload_keys(scene.raw, scene.name) if scene.raw.ttl(key) < 0}
    assert pinned == {scene.keys.payload(gid, "init") for gid in gids(8, 10, 11, 13)}


def stages_of(scene: Scene) -> dict[str, int]:
    return scene.run.account.totals().tasks[0].stages


def test_an_empty_server_is_refused_and_filled_again_when_asked_by_name(
    scene: Scene, trainer: Trainer
) -> None:
    scene.ready(*[0] * 6)
    for step in (1, 2, 3):
        trainer.train(step)
    position = trainer.save(keep=2)
    trainer.lose_all_since({})
    with pytest.raises(LostRun, match="no run of that name"):
        trainer.open(position)
    with pytest.raises(LostRun, match="no run of that name"):
        trainer.open(position, regenerate=True)
    again = Scene(scene.store, scene.raw, scene.name, scene.run.limits)
    trainer.scene = again
    before = again.dump()
    with pytest.raises(LostRun, match="this server holds run"):
        trainer.open(position)
    assert again.dump() == before
    trainer.open(position, regenerate=True)
    assert again.run.ledger.steps() == (3, 3, 3)
    assert trainer.position.run_nonce == again.run.nonce != scene.run.nonce
    again.check()
    assert (again.counters()["reasserted"], again.counters()["regenerated"]) == ("3", "3")
    again.open_producer()
    assert again.run.jobs.next_draw(again.producer, "math") == 3
    again.ready(0, 0)
    trainer.train(4, math=2)
    assert trainer.position.manifest(4).gids == gids(3, 4)  # type: ignore[union-attr]
    again.check()


def test_an_empty_server_with_the_nonce_of_the_run_is_refused_too(
    scene: Scene, trainer: Trainer
) -> None:
    scene.ready(0)
    trainer.train(1)
    position = trainer.save()
    nonce = scene.run.nonce
    trainer.lose_all_since({})
    scene.run.create(scene.store, scene.name, nonce, scene.run.limits, FIRST, "/w")
    with pytest.raises(LostRun, match="no trainer has ever opened"):
        trainer.open(position)
    trainer.open(position, regenerate=True)
    # once it is restored, it is a run like any other
    trainer.open(position)
    scene.check()


def test_going_back_below_what_is_freed_generates_what_came_after(
    scene: Scene, trainer: Trainer
) -> None:
    scene.ready(*[0] * 8)
    trainer.train(1)
    first = trainer.save()
    for step in (2, 3, 4):
        trainer.train(step)
    trainer.save(keep=3)
    scene.run.janitor.sweep()
    opening = trainer.open(first, regenerate=True)
    assert scene.run.ledger.steps() == (1, 1, 1)
    assert opening.recovery.dissolved == 1
    # the bytes of 4 were kept: it is ready, and not generated again
    assert [stage(scene, draw) for draw in range(5)] == [["archived"], [], [], ["pool"], ["pool"]]
    assert scene.counters()["regenerated"] == "2"
    scene.check()
    assert scene.enqueue(3).cursor == 4
    scene.check()
    for job in scene.claim(2):
        scene.submit(job)
    trained = [
        gid
        for step, count in ((2, 2), (3, 2), (4, 3))
        for gid in trainer.train(step, math=count).gids
    ]
    assert sorted(trained) == gids(*range(1, 8))
    trainer.save()
    scene.check()


def test_what_was_trained_only_before_a_regenerate_that_the_server_forgot_is_drawn_again(
    scene: Scene, trainer: Trainer
) -> None:
    """Lose all checkpoints, train anew with other groups, and reset the server to before that."""
    scene.ready(0, 0)
    trainer.train(1)
    trainer.save()
    moment = trainer.now()
    trainer.open(Position(), regenerate=True)
    assert trainer.train(1).gids == gids(1)
    trainer.save()
    trainer.lose_all_since(moment)
    assert stage(scene, 0) == ["archived"]

    trainer.open()
    assert [stage(scene, draw) for draw in (0, 1)] == [[], ["archived"]]
    assert scene.run.jobs.cursor("math") == 0
    scene.check()
    scene.ready(0)
    assert trainer.train(2).gids == gids(0)
    scene.check()


def test_imported_groups_that_the_server_forgot_are_dropped_unless_they_were_trained(
    scene: Scene, trainer: Trainer
) -> None:
    outside = [group_id("math", IMPORTED_FROM + number) for number in (0, 2)]
    trainer.position.add(
        Manifest.parse(1, ["step=1", *(f"{gid} lost 1 9 - 2 -" for gid in outside)])
    )
    trainer.position.forget(1)
    trainer.open()
    assert [stage(scene, IMPORTED_FROM + number) for number in range(4)] == [
        ["archived"],
        ["dropped"],
        ["archived"],
        [],
    ]
    assert scene.counters()["imported"] == "3"
    scene.check()


class Died(Exception):
    """Stands for SIGKILL between two calls."""


def test_a_trainer_that_dies_anywhere_in_it_leaves_what_the_next_one_can_go_on_with(
    make_scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.ledger.ended_draws.GROUPS_PER_CALL", 2)
    scene = make_scene(role_timeout_ms=60_000, stale_threshold=100)
    scene.open_producer()
    trainer = Trainer(scene)
    scene.enqueue(12)
    for job in scene.claim(6):
        scene.submit(job)
    moment = trainer.now()
    for job in scene.claim(6):
        scene.submit(job)
    trainer.train(1, math=3)
    trainer.train(2, math=4)
    trainer.train(3, math=1)
    position = trainer.save(keep=1)
    die_after = 0
    scripts = list[str]()
    send = Store.send

    def dying(store: Store, what: str, commands: Any, **options: Any) -> Any:
        answers = send(store, what, commands, **options)
        # an earlier handle may still read ahead in a thread of its own
        is_mine = threading.current_thread() is threading.main_thread()
        if is_mine and any(isinstance(each, ScriptCall) for each in commands):
            scripts.append(what)
            if len(scripts) == die_after:
                raise Died
        return answers

    monkeypatch.setattr(Store, "send", dying)
    outcomes = []
    while True:
        die_after += 1
        scripts.clear()
        trainer.lose_all_since(moment)
        with contextlib.suppress(Died):
            trainer.open(position)
            break
        holder = scene.raw.hget(scene.keys.control, "trainer").decode()
        if scripts[-1] != "rescore":
            assert scene.run.ledger.take(holder, 4, {"math": 1}) == NotReady({}, recovering=True)
        scene.check()
        trainer.open(position)
        scene.check()
        assert scene.run.ledger.steps() == (3, 3, 3)
        outcomes.append([stage(scene, draw) for draw in range(12)])
    assert {"commit", "mark_trained", "reset_ledger", "rescore"} <= set(scripts)
    assert len(outcomes) == len(scripts) >= 8
    assert outcomes == [[["archived"]] * 8 + [["waiting"]] * 4] * len(outcomes)


def test_a_live_trainer_learns_of_a_loss_when_it_takes_or_commits(
    scene: Scene, trainer: Trainer
) -> None:
    scene.ready(0, 0, 0)
    trainer.train(1)
    moment = trainer.now()
    trainer.train(2)
    trainer.lose_all_since(moment)
    with pytest.raises(LedgerError, match="lost data"):
        scene.take(3)
    with pytest.raises(LedgerError, match="lost data"):
        trainer.save()
    trainer.open(trainer.checkpoints[2])
    assert trainer.train(3).gids == gids(2)
    scene.check()


def test_regenerate_without_a_position_works_from_the_start_and_only_there(
    scene: Scene, trainer: Trainer
) -> None:
    scene.ready(*[0] * 4)
    for step in (1, 2):
        trainer.train(step)
    trainer.save()
    scene.run.janitor.sweep()
    with pytest.raises(LedgerError, match="batches up to step 2") as below:
        scene.run.trainers.open(new_nonce(), lineage="l2", take_over=True)
    assert "regenerate=True" in below.value.hint
    assert "--regenerate" in below.value.command_hint
    with pytest.raises(ConfigError, match="step 2 cannot be opened") as without:
        scene.run.trainers.open(new_nonce(), lineage="l2", step=2, regenerate=True)
    assert "position=" in without.value.hint
    scene.run.trainers.open(new_nonce(), lineage="l2", take_over=True, regenerate=True)
    assert scene.run.ledger.steps() == (0, 0, 0)
    scene.check()
