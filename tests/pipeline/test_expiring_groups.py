from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from buffer.config.assignments import parse_settings
from buffer.control.control import Mode
from buffer.control.length_counts import CUT, FINISHED, count, read_counts
from buffer.ids import new_nonce
from buffer.job import Job, ReleaseKind
from buffer.manifest import Manifest
from buffer.run.settings import LiveSettings
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.scene import rollout
from tests.pipeline.yard import FIRST, LINEAGE, SOME, TASK, Yard


def train(yard: Yard, step: int) -> None:
    yard.run.buffer.put(TASK, [[rollout(Status.COMPLETED, PolicyVersion(LINEAGE, step - 1))]])
    assert isinstance(yard.run.ledger.take(yard.trainer, step, {TASK: 1}), Manifest)


@pytest.mark.parametrize("partial_rollout", [False, True])
@pytest.mark.parametrize("mode", [Mode.RUN, Mode.KEEP])
async def test_expiring_groups_end_in_the_engine_and_others_start(
    yard: Yard, mode: Mode, partial_rollout: bool
) -> None:
    yard.enqueue(2, (50, 50))
    worker = yard.worker(held=True, partial_rollout=partial_rollout)
    async with yard.working(worker) as engine:
        await yard.until_generating(engine, 4)
        if mode is Mode.KEEP:
            await yard.receipts(yard.control(mode))
        train(yard, 1)
        await yard.until_stages(dropped=2, taken=1)
        assert engine.unfinished() == 0
        yard.control(Mode.RUN)
        weights = yard.publish(1)
        await yard.until(lambda: engine.version() == weights)
        engine.let_go()
        yard.enqueue(1)  # under the old weights it would be expiring, too
        await yard.until_stages(dropped=2, taken=1, completed=1)
        await yard.until(lambda: counted(yard) == 2 * 2 + 2)
    counts = yard.run.read_progress().tasks[TASK]
    assert (counts.ended_early, counts.expirations) == (2, 2)
    assert (counts.discarded_tokens, counts.unmade_tokens) == (4 * SOME, 4 * (50 - SOME))
    yard.check()


async def test_a_group_that_only_waits_for_its_judge_is_ended(yard: Yard) -> None:
    yard.run.set(parse_settings(LiveSettings, ["on_straggler=retry"]))
    (gid,) = yard.enqueue(1)
    calls = Counter[str]()

    async def judge(**_: object) -> float:
        calls["asked"] += 1
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            calls["cancelled"] += 1
            raise
        return 1.0

    async with yard.working(yard.worker(judge=judge)):
        await yard.until(lambda: calls["asked"] == 2)
        train(yard, 1)
        await yard.until_stages(expired=1, taken=1)
    assert calls["cancelled"] == 2
    counts = yard.run.read_progress().tasks[TASK]
    assert (counts.ended_early, counts.discarded_tokens, counts.unmade_tokens) == (1, 20, 0)
    assert yard.run.record(gid)["payload"] == "init"
    yard.check()


async def test_a_resumed_group_is_as_old_as_the_tokens_it_brought(yard: Yard) -> None:
    """This worker has sampled it under the new weights only."""
    yard.run.set(parse_settings(LiveSettings, ["max_staleness=1"]))
    yard.enqueue(1, (50, 50))
    worker = yard.worker(held=True, partial_rollout=True)
    async with yard.working(worker) as engine:
        await yard.until_generating(engine, 2)
        yard.control(Mode.ABORT)
        await yard.until_stages(aborted=1)
        train(yard, 1)
        yard.publish(1)
        yard.control(Mode.RUN)
        yard.reissue()
        await yard.until_generating(engine, 2)
        train(yard, 2)
        await yard.until_stages(dropped=1, taken=2)
        assert engine.unfinished() == 0
    yard.check()


async def test_lengths_are_counted_once_though_a_lease_was_lost_before_the_release(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = yard.run.jobs
    release = jobs.release
    kinds: list[str] = []

    def release_late(worker: str, job: Job, kind: ReleaseKind, *about: Any) -> str:
        kinds.append(kind)
        if kinds == ["expired"]:
            yard.run.fleet.fence(worker)
        return release(worker, job, kind, *about)

    monkeypatch.setattr(jobs, "release", release_late)
    yard.enqueue(1, (5, 50))  # only the first begins
    async with yard.working(yard.worker(held=True)) as engine:
        await yard.until_engine(lambda: len(engine.requests) == 2)
        train(yard, 1)
        await yard.until_stages(dropped=1, taken=1)
        await yard.until(lambda: counted(yard) > 0)
        assert counted(yard) == 1
    assert kinds == ["expired"] * 2
    yard.check()


def counted(yard: Yard) -> int:
    counts = read_counts(worker.lengths for worker in yard.run.fleet.workers())
    return count(counts.get(TASK, {}))


# -- protected completion ------------------------------


def enqueue_tail(yard: Yard, tokens: tuple[int, int]) -> str:
    """Enqueue a group that was interrupted once, which is too often, and waits again."""
    (gid,) = yard.enqueue(1, tokens)
    nonce = new_nonce()
    jobs = yard.run.jobs
    yard.run.fleet.register("hand", nonce, {})
    (job,) = jobs.claim("hand", nonce, new_nonce(), FIRST, 1).jobs
    jobs.release("hand", job, "aborted")
    assert jobs.reissue(yard.producer, TASK, "expired", 10_000) == 1
    yard.run.fleet.deregister("hand", nonce)
    return gid


async def test_pause_waits_for_the_protected_group_and_aborts_the_others_with_their_tokens(
    make_yard: Callable[..., Yard],
) -> None:
    yard = make_yard(tail_batch_max_tries=1)
    protected = enqueue_tail(yard, (250, 250))
    (other,) = yard.enqueue(1, (50, 50))
    async with yard.working(yard.worker(held=True, partial_rollout=True)) as engine:
        await yard.until_generating(engine, 4)
        aborting = yard.control(Mode.ABORT)
        await yard.until_engine(lambda: engine.unfinished() == 2)
        engine.make(250)
        await yard.receipts(aborting)
        assert yard.leases() == 0
        assert yard.stages() == {"completed": 1, "aborted": 1}
    assert yard.group(protected).lengths.tolist() == [250, 250]
    assert yard.group(other).status is Status.ABORTED
    assert yard.group(other).lengths.tolist() == [SOME, SOME]
    yard.check()


async def test_pause_ends_a_protected_group_that_takes_too_long(
    make_yard: Callable[..., Yard],
) -> None:
    yard = make_yard(tail_batch_max_tries=1, pause_timeout_s=0.5)
    gid = enqueue_tail(yard, (50, 50))
    async with yard.working(yard.worker(held=True)) as engine:
        await yard.until_generating(engine, 2)
        await yard.receipts(yard.control(Mode.ABORT))
        assert yard.stages() == {"expired": 1}
        assert engine.unfinished() == 0
    assert yard.run.record(gid)["aborts"] == "2"
    yard.check()


# -- lengths of what was started ------------------------------


def fates(yard: Yard) -> dict[str, int]:
    """How many responses a worker counted by what became of them."""
    counts = read_counts(worker.lengths for worker in yard.run.fleet.workers())
    return {fate: count({fate: numbers}) for fate, numbers in counts.get(TASK, {}).items()}


async def counts_as(yard: Yard, expected: dict[str, int]) -> None:
    await yard.until(lambda: fates(yard) == expected)
    yard.check()


async def test_a_group_over_its_time_limit_counts_with_what_it_made(yard: Yard) -> None:
    """In each of its three tries; a long response that is cut is no short one."""
    yard.enqueue(1, (10**6, 10**6))
    async with yard.working(yard.worker(token_s=0.001, group_time_limit_s=0.5)) as engine:
        await yard.until_stages(dead=1)
        assert engine.unfinished() == 0
        await counts_as(yard, {"failed" + CUT: 6})


async def test_a_try_that_its_judge_failed_counts_with_its_whole_length(yard: Yard) -> None:
    calls = Counter[str]()

    def judge(**_: object) -> float:
        calls["asked"] += 1
        if calls["asked"] == 1:
            raise ValueError("once")
        return 1.0

    yard.enqueue(1, (7, 7))
    async with yard.working(yard.worker(judge=judge)):
        await yard.until_stages(completed=1)
        await counts_as(yard, {"failed": 1, FINISHED: 2})


async def test_what_a_filter_rejects_was_started(yard: Yard) -> None:
    yard.enqueue(2, (7, 7))
    async with yard.working(yard.worker(is_valid_sample=lambda _: False)):
        await yard.until_stages(filtered=2)
        await counts_as(yard, {"filtered": 4})


@pytest.mark.parametrize("partial_rollout", [False, True])
async def test_an_update_that_discards_tokens_cuts_what_it_interrupts(
    yard: Yard, partial_rollout: bool
) -> None:
    yard.enqueue(1, (50, 50))
    worker = yard.worker(held=True, partial_rollout=partial_rollout)
    async with yard.working(worker) as engine:
        await yard.until_generating(engine, 2)
        yard.control(Mode.ABORT)
        await yard.until_stages(aborted=1)
        await counts_as(yard, {} if partial_rollout else {"interrupted" + CUT: 2})


async def test_an_expired_group_counts_with_its_ended_and_its_cut_responses(yard: Yard) -> None:
    yard.enqueue(1, (1, 50))
    async with yard.working(yard.worker(held=True)) as engine:
        await yard.until_generating(engine, 1)
        train(yard, 1)
        await yard.until_stages(dropped=1, taken=1)
        await counts_as(yard, {"expired": 1, "expired" + CUT: 1})
