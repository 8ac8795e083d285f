"""The members of a group and the pool it is in agree on what is too old (I8)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from buffer.run.settings import LiveSettings
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from buffer.wire.staleness import AgeLimit
from tests.buffer.scene import Scene, rollout

TOKENS = 4


def member(draw: random.Random, index: int, lineages: dict[str, range]) -> RolloutState:
    """A rollout of up to three weights, with a tool's tokens, or without any token."""
    spans = list[VersionSpan]()
    for start in range(draw.choice([0, 1, 1, 2, 3])):
        lineage = draw.choice(list(lineages))
        spans.append(VersionSpan(start, 1, draw.choice(lineages[lineage]), lineage))
    count = len(spans) and TOKENS
    mask = [int(n < len(spans) and draw.random() < 0.8) for n in range(count)]
    return RolloutState(
        index=index,
        prompt_ids=[1],
        response_ids=[5] * count,
        logprobs=[-0.5] * count,
        spans=spans,
        response_mask=mask or None,
        status=Status.COMPLETED if count else Status.ABORTED,
        reward={"score": 1.0} if count else None,
    )


def limit_of(scene: Scene, gid: str) -> AgeLimit:
    limit = scene.run.buffer.age_limit(gid)
    assert limit is not None
    return limit


@pytest.mark.parametrize("token_threshold", [None, 1])
def test_a_group_expires_if_and_only_if_one_of_its_members_starts_again(
    make_scene: Callable[..., Scene], token_threshold: int | None
) -> None:
    """Else a group that nothing changes would expire again and again, or be dropped for nothing."""
    scene = make_scene(stale_threshold=3, token_threshold=token_threshold, on_straggler="retry")
    scene.open_trainer(0, "l1")
    scene.raw.hset(scene.keys.ledger("train"), mapping={"taken": 9, "committed": 9})
    scene.open_trainer(6, "l2", take_over=True)  # versions of l1 count as 6 at most
    scene.raw.hset(scene.keys.ledger("train"), "taken", 9)
    lineages = {"l1": range(5, 10), "l2": range(6, 10)}
    draw = random.Random(0)
    scene.enqueue(120)
    jobs = scene.claim(60) + scene.claim(60)
    groups = {}
    for job in jobs:
        group = scene.run.buffer.read(job.payload)
        states = [member(draw, index, lineages) for index in range(draw.randint(1, 4))]
        groups[job.gid] = type(group)(job.gid, "math", states)
        scene.run.buffer.submit("w0", job, groups[job.gid], 0)
    scene.run.buffer.refresh_staleness("math")
    seen = set()
    for gid, group in groups.items():
        limit = limit_of(scene, gid)
        old = [limit.is_too_old(state) for state in group.states if len(state.spans)]
        record = scene.record(gid)
        assert any(old) == (record["status"] == "expired")
        if record["payload"] == "init" and token_threshold is None:
            assert all(old)
        if any(old) and not all(old):
            assert record["payload"] != "init"
            assert int(record["tokens"]) == group.lengths.sum()
        seen.add((any(old), all(old), record["payload"] == "init"))
    assert len(seen) >= 3
    assert scene.run.account.totals().clean


def test_a_member_that_was_found_too_old_stays_too_old(make_scene: Callable[..., Scene]) -> None:
    """Thresholds that change while its group waits, a worker that dies, and a result end it."""
    scene = make_scene(stale_threshold=3, on_straggler="retry")
    scene.open_trainer()
    scene.enqueue(1)
    (job,) = scene.claim()
    group = scene.run.buffer.read(job.payload)
    for state, version in zip(group.states, (0, 2), strict=True):
        state.response_ids = np.array([5, 6], "<i4")
        state.logprobs = np.array([-0.5, -0.5], "<f4")
        state.spans = [VersionSpan(0, 2, version, "l1")]
        state.status, state.reward = Status.COMPLETED, {"score": 1.0}
    made = type(group)(job.gid, "math", group.states)
    scene.run.buffer.submit("w0", job, made, 4)
    assert scene.pool("completed") == [(job.gid, 0.0)]
    scene.raw.hset(scene.keys.ledger("train"), "taken", 2)
    scene.run.set(LiveSettings(max_staleness=0))
    assert scene.run.buffer.refresh_staleness("math") == {"math": 1}
    scene.run.set(LiveSettings(max_staleness=2))

    def old() -> list[bool]:
        limit = limit_of(scene, job.gid)
        return [limit.is_too_old(state) for state in made.states]

    assert old() == [True, False]  # by the threshold of that moment
    assert scene.run.jobs.reissue(scene.producer, "math", "expired", 1000) == 1
    scene.claim()
    scene.expire_leases()
    scene.run.jobs.reap()
    (again,) = scene.claim(worker="w1")
    assert (old(), again.payload.token) == ([True, False], job.token)
    made.states[0].spans = [VersionSpan(0, 2, 2, "l1")]
    made = type(group)(job.gid, "math", made.states)
    scene.run.buffer.submit("w1", again, made, 2)
    assert scene.pool("completed") == [(job.gid, 2.0)]
    assert scene.record(job.gid)["tokens"] == "4"
    assert old() == [False, False]
    assert scene.run.account.totals().clean


def test_a_group_that_expires_while_it_waits_keeps_members_that_are_not_too_old(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(stale_threshold=3, on_straggler="retry")
    scene.open_trainer()
    scene.enqueue(1)
    (job,) = scene.claim()
    group = scene.run.buffer.read(job.payload)
    for state, version in zip(group.states, (0, 2), strict=True):
        state.response_ids = np.array([5, 6], "<i4")
        state.logprobs = np.array([-0.5, -0.5], "<f4")
        state.spans = [VersionSpan(0, 2, version, "l1")]
        state.status = Status.ABORTED
    scene.run.buffer.submit("w0", job, type(group)(job.gid, "math", group.states), 4)
    assert scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000) == 1
    scene.raw.hset(scene.keys.ledger("train"), "taken", 3)
    scene.run.janitor.sweep()
    assert [gid for gid, _ in scene.pool("expired")] == [job.gid]
    limit = limit_of(scene, job.gid)
    kept = scene.run.buffer.read(scene.payload(job.gid))
    assert [limit.is_too_old(state) for state in kept.states] == [True, False]
    assert scene.run.account.totals().clean


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.ABORTED])
def test_fresh_siblings_of_an_expired_rollout_keep_their_tokens(
    make_scene: Callable[..., Scene], status: Status
) -> None:
    """Whether it expires in its pool or when it is put: the worker that claims the group resets it."""
    scene = make_scene(stale_threshold=4, on_straggler="retry")
    scene.open_trainer()
    taken = partial(scene.raw.hset, scene.keys.ledger("train"), "taken")
    taken(7)
    states = [
        rollout(status, PolicyVersion("l1", version), n) for n, version in enumerate((4, 6, 4))
    ]
    (aged,) = scene.run.buffer.put("math", [states])
    taken(8)
    assert scene.run.buffer.refresh_staleness("math") == {"math": 1}
    (late,) = scene.run.buffer.put("math", [states])
    for gid in (aged, late):
        limit = scene.run.buffer.age_limit(gid)
        group = scene.run.buffer.read(scene.payload(gid))
        assert limit is not None
        assert [limit.is_too_old(state) for state in group.states] == [True, False, True]
        assert (scene.record(gid)["status"], scene.record(gid)["version"]) == ("expired", "")
    assert scene.run.account.totals().clean
