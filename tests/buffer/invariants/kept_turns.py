"""Turns of agents: each is kept once, by whoever holds the group, and freed with it."""

from __future__ import annotations

from typing import Any

import pytest

from buffer.errors import Fenced
from buffer.groups.kept_turns import KeptTurns
from buffer.wire.rollout import Status
from tests.buffer.scene import FIRST, Scene, extend, turn
from tests.buffer.time_machine import put_back, remember


def _said(scene: Scene, gid: str) -> list[int]:
    """The turns that the next claim of a group would find."""
    turns = scene.run.buffer.read(scene.payload(gid)).turns
    return [int(state.response_ids[0]) for state in turns]


def _say(kept: KeptTurns, *numbers: int) -> None:
    for number in numbers:
        kept.add(turn(number))
    kept.store()


def turns_outlive_their_workers(scene: Scene) -> None:
    """Turns are kept by whoever holds the group, each once, and all of them are freed with it."""
    scene.open_trainer(lineage="l0")
    scene.enqueue(1)
    (first,) = scene.claim()
    gid = first.gid
    before = scene.turns(first)
    _say(before, 1)
    _say(before, 2, 3)
    assert _said(scene, gid) == [1, 2, 3]
    assert scene.ages() == {gid: 0}
    scene.check()
    scene.expire_leases("w0")
    assert scene.run.jobs.reap().waiting == 1
    scene.check()
    with pytest.raises(Fenced):
        _say(before, 4)
    (second,) = scene.claim(worker="w1")
    assert second.payload == scene.payload(gid)
    with pytest.raises(Fenced):
        _say(before, 5)
    assert _said(scene, gid) == [1, 2, 3]
    claimed = scene.run.buffer.read(second.payload)
    after = scene.turns(second, claimed)
    for state in claimed.turns:
        after.add(state)
    _say(after, 6)
    scene.run.payloads.collect()
    assert _said(scene, gid) == [1, 2, 3, 6]
    scene.check()
    scene.run.buffer.submit("w1", second, extend(claimed, Status.COMPLETED, FIRST), 2)
    with pytest.raises(Fenced):
        _say(after, 7)
    scene.check()
    scene.run.payloads.collect()
    # those of calls that were refused expire
    left = scene.raw.keys(scene.keys.payload(gid, "*-turns*"))
    assert min(map(scene.raw.ttl, left)) > 0


def tries_count_claims_without_progress(scene: Scene) -> None:
    """A group whose workers die goes on as long as it grows; what only begins again does not."""
    scene.open_trainer(lineage="l0")
    scene.enqueue(1)

    def tries_after_death(said: int, *, begins_again: bool = False) -> str:
        """A worker claims the group, keeps so many new turns, and dies."""
        jobs = scene.claim()
        assert jobs, "it is dead"
        (job,) = jobs
        group = scene.run.buffer.read(job.prompt if begins_again else job.payload)
        if said:
            kept = scene.turns(job, group)
            for state in group.turns:
                kept.add(state)
            _say(kept, *range(said))
        scene.expire_leases()
        assert scene.run.jobs.reap().groups == 1
        scene.check()
        return scene.record(job.gid)["tries"]

    assert [tries_after_death(n) for n in (1, 0, 2, 0, 1, 1, 1, 0)] == [*"01010001"]
    (job,) = scene.claim()
    scene.submit(job, status=Status.ABORTED)
    assert scene.record(job.gid)["tries"] == "0"
    assert scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000) == 1
    assert tries_after_death(3, begins_again=True) == "1", "it had more tokens before"
    assert tries_after_death(4, begins_again=True) == "2"
    assert scene.record(job.gid)["stage"] == "dead"
    assert scene.run.jobs.requeue(job.gid) == "dead"
    assert tries_after_death(1) == "0"


def turns_are_of_one_worker(scene: Scene) -> None:
    """A group that one claim made has no other author; a worker may keep many turns."""
    scene.open_trainer(lineage="l0")
    scene.enqueue(1)
    (job,) = scene.claim()
    kept = scene.turns(job)
    for number in range(5):
        _say(kept, number)
        scene.check()
    scene.submit(job)
    scene.run.payloads.collect()
    scene.check()


def turns_that_the_server_lost_come_back(scene: Scene) -> None:
    """A server went back to before the last call: the worker, which lives, stores them again."""
    scene.open_trainer(lineage="l0")
    scene.enqueue(1)
    (job,) = scene.claim()
    kept = scene.turns(job)
    _say(kept, 1)
    moment = remember(scene.raw, scene.name)
    _say(kept, 2)
    put_back(scene.raw, scene.name, moment)
    _say(kept, 3)
    assert _said(scene, job.gid) == [1, 2, 3]
    scene.check()
    scene.run.payloads.collect()
    scene.check()
    scene.submit(job)  # by a worker that counts only the turns that it keeps
    scene.run.jobs.drop(scene.ready(0)[0])
    account = scene.run.account.tokens()["math"]
    assert (account.total, account.ended) == (3, 0)
    assert not scene.raw.exists(scene.keys.worker_tokens_of)  # of no worker
    scene.check()


def a_late_copy_of_kept_turns_changes_nothing(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.enqueue(1)
    (job,) = scene.claim()
    kept = scene.turns(job)
    calls = []
    send = scene.run.store.send

    def noted(what: str, commands: Any, **options: Any) -> Any:
        calls.append((what, commands))
        return send(what, commands, **options)

    scene.run.store.send = noted  # type: ignore[method-assign]
    _say(kept, 1)
    _say(kept, 2)
    for call in (*calls, *reversed(calls)):
        assert send(*call)[-1] == ["OK"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("buffer.groups.kept_turns.MOST_CHUNKS", 2)
        _say(kept, 3)
    scene.run.store.send = send  # type: ignore[method-assign]
    scene.run.payloads.collect()
    for call in (*calls, *reversed(calls)):
        send(*call)
        scene.check()
    assert _said(scene, job.gid) == [1, 2, 3]
