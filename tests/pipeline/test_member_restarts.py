from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from buffer.control.control import Mode
from buffer.errors import JudgeError
from buffer.groups.claim import Claim
from buffer.ids import new_nonce
from buffer.limits import TaskLimits
from buffer.manifest import NotReady
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from producer_workers.judges.judge import Judge
from rolloutmq.views.explain.diagnosis import diagnose
from rolloutmq.views.number_rows import FAMILIES
from rolloutmq.views.run_json import describe
from rolloutmq.views.run_view import read_run_view
from tests.pipeline.yard import FIRST, LINEAGE, TASK, WatchedEngine, Yard, versions


def by_member(group: RolloutGroup) -> dict[int, RolloutState]:
    return {state.index: state for state in group.states}


def asserts_same(before: RolloutState, after: RolloutState) -> None:
    """A member that was kept is the same to the last bit."""
    assert np.array_equal(before.response_ids, after.response_ids)
    assert np.array_equal(before.logprobs, after.logprobs)
    assert (before.spans, before.reward) == (after.spans, after.reward)
    assert (before.status, before.finish_reason) == (after.status, after.finish_reason)


async def test_an_abort_without_partial_rollout_restarts_only_unfinished_members(
    yard: Yard,
) -> None:
    """Over two pauses: a finished member is kept, and its group is as old as this member."""
    (gid,) = yard.enqueue(1, (5, 50, 30))
    async with yard.working(yard.worker(held=True)) as engine:
        await yard.until_engine(lambda: len(engine.requests) == 3)
        await yard.until_generating(engine, 2)
        await yard.receipts(yard.control(Mode.ABORT))
        first = by_member(yard.group(gid))
        assert [len(first[n].response_ids) for n in range(3)] == [5, 0, 0]
        assert yard.stages() == {"aborted": 1}

        yard.publish(3)
        yard.control(Mode.RUN)
        yard.reissue()
        await yard.until_engine(lambda: len(engine.requests) == 5)
        engine.make(30)
        await yard.until_generating(engine, 1)
        await yard.receipts(yard.control(Mode.ABORT))
        second = by_member(yard.group(gid))
        assert [len(second[n].response_ids) for n in range(3)] == [5, 0, 30]
        asserts_same(first[0], second[0])
        assert versions(second[2]) == [PolicyVersion(LINEAGE, 3)] * 30
        assert yard.counters()["produced_tokens"] == 35
        yard.control(Mode.RUN)
        yard.reissue()
    async with yard.working(yard.worker("fast")) as engine:
        await yard.until_stages(completed=1)
        assert [request.split("/")[1] for request, _, _ in engine.requests] == ["1"]
    last = by_member(yard.group(gid))
    asserts_same(first[0], last[0])
    asserts_same(second[2], last[2])
    assert versions(last[1]) == [PolicyVersion(LINEAGE, 3)] * 50
    (record,) = yard.records()
    assert (record["version"], record["tries"], record["aborts"]) == ("0", "0", "2")
    assert (record["tokens"], yard.counters()["produced_tokens"]) == ("85", 85)
    yard.check()


class Ranking(Judge):
    """Judges a group together, by length."""

    name = "ranking"
    sees_group = True

    def __init__(self) -> None:
        self.judged: list[int] = []

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        self.judged.append(len(states))
        return [{"score": float(len(state.response_ids))} for state in states]


async def test_members_that_wait_for_the_judge_of_their_group_keep_their_tokens(yard: Yard) -> None:
    (gid,) = yard.enqueue(1, (5, 40))
    judge = Ranking()
    async with yard.working(yard.worker(held=True, judge=judge)) as engine:
        await yard.until_engine(lambda: len(engine.requests) == 2)
        await yard.until_generating(engine, 1)
        await yard.receipts(yard.control(Mode.ABORT))
        assert yard.group(gid).lengths.tolist() == [5, 0]
        assert judge.judged == []
        yard.control(Mode.RUN)
        yard.reissue()
    async with yard.working(yard.worker("fast", judge=judge)) as engine:
        await yard.until_stages(completed=1)
        assert len(engine.requests) == 1
    assert judge.judged == [2]
    assert yard.group(gid).scores.tolist() == [5.0, 40.0]
    yard.check()


@pytest.mark.parametrize("partial", [True, False], ids=["partial", "whole"])
async def test_a_group_that_expires_restarts_only_members_that_are_too_old(
    make_yard: Callable[..., Yard], partial: bool
) -> None:
    """By the worker that claims it, with the newest weights, also after another one died with it.

    The kept members are what was sampled under version 2, and the new ones cannot be handed out too
    old (I8).
    """
    tasks = {TASK: TaskLimits(on_straggler="retry")}
    yard = make_yard(stale_threshold=2, tasks=tasks)
    (gid,) = yard.enqueue(1, (5, 6, 400, 7))
    weights = PolicyVersion(LINEAGE, 2)
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
    yard.run.store.client.hset(yard.run.keys.ledger("train"), "taken", 2)
    assert yard.run.buffer.refresh_staleness(TASK) == {TASK: 1}
    before = by_member(yard.group(gid))
    yard.publish(2)
    assert yard.run.jobs.reissue(yard.producer, TASK, "expired", 10_000) == 1
    (job,) = claim(yard, "w9", weights, 2).jobs
    yard.run.fleet.fence("w9")
    async with yard.working(yard.worker(partial_rollout=partial)) as engine:
        await yard.until_stages(completed=1)
        members = sorted(request.split("/")[1] for request, _, _ in engine.requests)
        assert members == ["0", "2"]
        assert {length for _, length, _ in engine.requests} == {3}
    after = by_member(yard.group(gid))
    for kept in (1, 3):
        asserts_same(before[kept], after[kept])
    assert versions(after[0]) == [weights] * 5
    assert versions(after[2]) == [weights] * 400
    (record,) = yard.records()
    assert (record["version"], record["tokens"]) == ("2", str(6 + 6 + 5 + 400))
    assert yard.counters()["produced_tokens"] == 22 + 5 + 400
    yard.run.store.client.hset(yard.run.keys.ledger("train"), "taken", 0)
    yard.check()


def claim(yard: Yard, worker: str, weights: PolicyVersion, limit: int) -> Claim:
    """Claim as a worker that exists only on the server."""
    nonce = new_nonce()
    yard.run.fleet.register(worker, nonce, {"engine": "none"})
    return yard.run.jobs.claim(worker, nonce, new_nonce(), weights, limit)


class FailsFor(Judge):
    """Judges every rollout with 1, but raises for one member, `times` times."""

    name = "fails for"

    def __init__(self, index: int, times: int = 1000) -> None:
        self.index = index
        self.left = times
        self.judged: list[int] = []

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        (state,) = states
        self.judged.append(state.index)
        if state.index == self.index and self.left:
            self.left -= 1
            raise JudgeError("no verdict")
        return [{"score": 1.0}]


def members_of(engine: WatchedEngine) -> list[str]:
    return [request.split("/")[1] for request, _, _ in engine.requests]


def test_a_member_that_fails_is_generated_again_alone(yard: Yard) -> None:
    yard.enqueue(1, (10, 10, 10))
    judge = FailsFor(1, times=2)

    async def scenario() -> list[str]:
        async with yard.working(yard.worker(judge=judge)) as engine:
            await yard.until_stages(completed=1)
            await yard.until(lambda: read_run_view(yard.run).retries.total() == 2)
            view = read_run_view(yard.run)
            assert "task/retries" in [symptom.name for symptom in diagnose(view)]
            assert describe(view)["retried"] == 2
            (counts,) = describe(view)["workers"][0]["retried"].values()
            assert [*counts.values()] == [2]
            (family,) = [each for each in FAMILIES if each.name == "worker_rollouts_retried"]
            assert [sample.value for sample in family.metric({"run": view}).samples] == [2]
            return members_of(engine)

    assert sorted(asyncio.run(scenario())) == ["0", "1", "1", "1", "2"]
    assert sorted(judge.judged) == [0, 1, 1, 1, 2]
    (record,) = yard.records()
    assert (record["tries"], record["samples"], record["tokens"]) == ("0", "3", "30")
    assert yard.counters().get("failed", 0) == 0
    yard.check()


def test_a_group_is_dropped_with_a_member_that_always_fails(make_yard: Callable[..., Yard]) -> None:
    yard = make_yard(max_tries=2)
    (gid,) = yard.enqueue(1, (10, 10))

    async def scenario() -> list[str]:
        async with yard.working(yard.worker(judge=FailsFor(1))) as engine:
            await yard.until_stages(dead=1)
            return members_of(engine)

    # two tries of the member at the first claim, one at the last
    assert asyncio.run(scenario()) == ["0", "1", "1", "0", "1"]
    assert "no verdict" in yard.run.dead_letters.reason(gid)["reason"]
    yard.check()


@pytest.mark.parametrize("size", [3, 2])
async def test_a_group_is_trained_without_a_member_that_always_fails_if_two_are_left(
    make_yard: Callable[..., Yard], size: int
) -> None:
    yard = make_yard(max_tries=1)
    (gid,) = yard.enqueue(1, [10] * size)
    worker = yard.worker(judge=FailsFor(1), on_failed_member="train")
    async with yard.working(worker):
        await yard.until_stages(**{"completed" if size == 3 else "dead": 1})
    if size == 3:
        assert sorted(by_member(yard.group(gid))) == [0, 2]
        assert yard.records()[0]["samples"] == "2"
        taken = yard.run.take_batch(yard.trainer, 1, {TASK: 1})
        assert not isinstance(taken, NotReady)
        (group,) = taken[TASK]
        assert group.scores.tolist() == [1.0, 1.0]
    yard.check()
