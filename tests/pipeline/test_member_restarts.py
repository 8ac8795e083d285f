"""Members, not groups, start again: after a pause, with age, and after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from buffer.control.control import Mode
from buffer.groups.claim import Claim
from buffer.model.group import RolloutGroup
from buffer.model.ids import new_nonce
from buffer.model.limits import TaskLimits
from buffer.model.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from tests.pipeline.yard import FAST_S, FIRST, LINEAGE, SLOW_S, TASK, Yard, versions


def by_member(group: RolloutGroup) -> dict[int, RolloutState]:
    return {state.index: state for state in group.states}


def asserts_same(before: RolloutState, after: RolloutState) -> None:
    """A member that was kept is the same to the last bit."""
    assert np.array_equal(before.response_ids, after.response_ids)
    assert np.array_equal(before.logprobs, after.logprobs)
    assert (before.spans, before.reward) == (after.spans, after.reward)
    assert (before.status, before.finish_reason) == (after.status, after.finish_reason)


def test_an_abort_without_partial_rollout_restarts_only_unfinished_members(yard: Yard) -> None:
    """Over two pauses: a finished member is kept, and its group is as old as this member."""
    (gid,) = yard.enqueue(1, (5, 5000, 30))

    async def scenario() -> None:
        async with yard.working(yard.worker(token_s=SLOW_S)) as engine:
            await yard.until(lambda: len(engine.requests) == 3 and engine.unfinished() == 2)
            await yard.receipts(yard.control(Mode.ABORT))
            first = by_member(yard.group(gid))
            assert [len(first[n].response_ids) for n in range(3)] == [5, 0, 0]
            assert yard.places() == {"aborted": 1}

            yard.publish(3)
            yard.control(Mode.RUN)
            yard.reissue()
            await yard.until(lambda: len(engine.requests) == 5 and engine.unfinished() == 1)
            await yard.receipts(yard.control(Mode.ABORT))
            second = by_member(yard.group(gid))
            assert [len(second[n].response_ids) for n in range(3)] == [5, 0, 30]
            asserts_same(first[0], second[0])
            assert versions(second[2]) == [PolicyVersion(LINEAGE, 3)] * 30
            assert yard.counters()["produced_tokens"] == 35
            yard.control(Mode.RUN)
            yard.reissue()
        async with yard.working(yard.worker("fast", token_s=FAST_S)) as engine:
            await yard.until_places(completed=1)
            assert [request.split("/")[1] for request, _, _ in engine.requests] == ["1"]
        last = by_member(yard.group(gid))
        asserts_same(first[0], last[0])
        asserts_same(second[2], last[2])
        assert versions(last[1]) == [PolicyVersion(LINEAGE, 3)] * 5000

    asyncio.run(scenario())
    (record,) = yard.records()
    assert (record["version"], record["tries"], record["aborts"]) == ("0", "0", "2")
    assert (record["tokens"], yard.counters()["produced_tokens"]) == ("5035", 5035)
    yard.check()


class Ranking:
    """Judges a group together, by length."""

    name = "ranking"

    def __init__(self) -> None:
        self.judged: list[int] = []

    async def judge(self, state: RolloutState) -> dict[str, float]:
        raise NotImplementedError

    async def judge_group(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        self.judged.append(len(states))
        return [{"score": float(len(state.response_ids))} for state in states]


def test_members_that_wait_for_the_judge_of_their_group_keep_their_tokens(yard: Yard) -> None:
    (gid,) = yard.enqueue(1, (5, 400))
    judge = Ranking()

    async def scenario() -> None:
        async with yard.working(yard.worker(token_s=SLOW_S, judge=judge)) as engine:
            await yard.until(lambda: len(engine.requests) == 2 and engine.unfinished() == 1)
            await yard.receipts(yard.control(Mode.ABORT))
            assert yard.group(gid).lengths.tolist() == [5, 0]
            assert judge.judged == []
            yard.control(Mode.RUN)
            yard.reissue()
        async with yard.working(yard.worker("fast", token_s=FAST_S, judge=judge)) as engine:
            await yard.until_places(completed=1)
            assert len(engine.requests) == 1

    asyncio.run(scenario())
    assert judge.judged == [2]
    assert yard.group(gid).scores.tolist() == [5.0, 400.0]
    yard.check()


@pytest.mark.parametrize("partial", [True, False], ids=["partial", "whole"])
def test_a_group_that_expires_restarts_only_members_that_are_too_old(
    make_yard: Callable[..., Yard], partial: bool
) -> None:
    """By the worker that claims it, with the newest weights, also after another one died with it.

    The kept members are what was sampled under version 2, and the new ones cannot be handed out too
    old (I8).
    """
    tasks = {TASK: TaskLimits(tail_batch_trigger_size=0)}
    yard = make_yard(stale_threshold=2, tasks=tasks)
    (gid,) = yard.enqueue(1, (5, 6, 400, 7))
    weights = PolicyVersion(LINEAGE, 2)

    async def scenario() -> None:
        (job,) = claim(yard, "w9", FIRST, 1).jobs
        states = yard.group(gid).states
        for state, version in zip(states, (0, 2, 0, 2), strict=True):
            tokens = np.full(5 if version == 0 else 6, 7, "<i4")
            span = VersionSpan(0, len(tokens), version, LINEAGE)
            state.append(tokens, np.full(len(tokens), -0.5, "<f4"), [span])
            state.status, state.finish_reason = Status.COMPLETED, "stop"
            state.reward = {"score": 0.25}
        states[2].status, states[2].finish_reason = Status.ABORTED, "abort"
        states[2].reward = None
        yard.run.buffer.submit("w9", job, RolloutGroup(gid, TASK, states), 22)
        yard.run.store.control.hset(yard.run.keys.ledger("train"), "taken", 2)
        assert yard.run.buffer.refresh_staleness(TASK) == {TASK: 1}
        before = by_member(yard.group(gid))
        yard.publish(2)
        assert yard.run.jobs.reissue(yard.producer, TASK, "expired", 10_000) == 1
        (job,) = claim(yard, "w9", weights, 2).jobs
        yard.run.fleet.fence("w9")
        async with yard.working(yard.worker(token_s=FAST_S, partial_rollout=partial)) as engine:
            await yard.until_places(completed=1)
            members = sorted(request.split("/")[1] for request, _, _ in engine.requests)
            assert members == ["0", "2"]
            assert {length for _, length, _ in engine.requests} == {3}
        after = by_member(yard.group(gid))
        for kept in (1, 3):
            asserts_same(before[kept], after[kept])
        assert versions(after[0]) == [weights] * 5
        assert versions(after[2]) == [weights] * 400

    asyncio.run(scenario())
    (record,) = yard.records()
    assert (record["version"], record["tokens"]) == ("2", str(6 + 6 + 5 + 400))
    assert yard.counters()["produced_tokens"] == 22 + 5 + 400
    yard.run.store.control.hset(yard.run.keys.ledger("train"), "taken", 0)
    yard.check()


def claim(yard: Yard, worker: str, weights: PolicyVersion, limit: int) -> Claim:
    """Claim as a worker that exists only on the server."""
    nonce = new_nonce()
    yard.run.fleet.register(worker, nonce, {"engine": "none"})
    return yard.run.jobs.claim(worker, nonce, new_nonce(), weights, limit)
