"""Members, not groups, start again: after a pause, with age, and after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from buffer.control.control import Mode
from buffer.model.group import RolloutGroup
from buffer.model.rollout import PolicyVersion, RolloutState
from tests.pipeline.yard import FAST_S, LINEAGE, SLOW_S, Yard, versions


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
