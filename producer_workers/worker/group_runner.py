"""What a worker does with one group, from its claim to its submit or release.

Invariant: a group ends in exactly one call to the server, a submit or a release, repeated while the
server is unreachable. An engine that dies costs each group that it was sampling a try; last tries
run alone, so only the prompt that kills engines becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from buffer.control.length_counts import CUT, FINISHED, LengthCounts
from buffer.control.retry_counts import RetryCounts
from buffer.errors import (
    Fenced,
    GroupAbandoned,
    GroupChanged,
    GroupHeld,
    GroupTimeout,
    JudgeInterrupted,
    LostRun,
    PayloadMissing,
    RolloutMQError,
    RunDamaged,
    Skip,
    StoreUnavailable,
    WireError,
    describe,
)
from buffer.failure_text import cause_of, headline, message_of
from buffer.job import EndedEarly, Job, ReleaseKind, Result, SampledTokens
from buffer.observers import all_of
from buffer.redis.retry import LogOnce
from buffer.run.run import Run
from buffer.wire.columns import all_columns
from buffer.wire.group import GROUP_TIME, RolloutGroup
from buffer.wire.rollout import RolloutState, Status, has_ended
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.engines.base import EngineDeadError
from producer_workers.user_code.failure import log_failure
from producer_workers.user_code.user_function import outcome_of
from producer_workers.worker.claims import FailureBackoff
from producer_workers.worker.held_groups import HeldGroups
from producer_workers.worker.loop_border import LoopInput, check_weights
from producer_workers.worker.shared_engine import SharedEngine
from producer_workers.worker.submitter import Submitter
from producer_workers.worker.task_runner import TaskRunner, restart_too_old, restart_unfinished

log = logging.getLogger("rolloutmq.worker")
T = TypeVar("T")

# Dead letters of one cause, and of all, whose responses a worker keeps: a judge that always raises
# must not fill the server.
KEPT_OF_CAUSE = 32
KEPT = 256

# What became of the responses of a released group (buffer/control/length_counts.py).
FATES: Mapping[ReleaseKind, str] = {
    "failed": "failed",
    "lost": "failed",
    "handback": "failed",
    "aborted": "interrupted",
    "expired": "expired",
    "skipped": "skipped",
}


@dataclass(frozen=True, slots=True)
class Submit:
    """The group goes to its pool; `new_tokens`: that are not counted yet."""

    group: RolloutGroup
    new_tokens: int
    is_kept: bool  # whether to train it


@dataclass(frozen=True, slots=True)
class Release:
    """The group goes to another worker, to the aborted pool, or ends with its reason."""

    kind: ReleaseKind
    reason: str
    ended: EndedEarly | None = None
    record: Mapping[str, Any] | None = None  # `extra` of a skipped group
    error: EngineDeadError | None = None  # to raise once the group is released


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody wants the group any more."""

    reason: str


End = Submit | Release | Drop


@dataclass(eq=False)
class GroupRunner:
    """Generates, judges and submits the groups of one worker."""

    _run: Run
    _engine: SharedEngine
    _held: HeldGroups
    _tasks: Mapping[str, TaskRunner]
    _worker: str
    _failures: FailureBackoff

    def __post_init__(self) -> None:
        self._submitter = Submitter(self._run, self._worker)
        self.tokens = self.done = self.failed = 0
        self.lengths = LengthCounts()
        self.retries = RetryCounts()
        self._kept = Counter[str]()  # dead letters with their responses, by cause
        self._outage = LogOnce(log, "waiting for the server with groups that are held")

    async def run(self, job: Job) -> None:
        """Generate and judge one group, and end it.

        Raises EngineDeadError, GroupChanged, LostRun, and RunDamaged where the result cannot be
        submitted. Any other failure only releases the group.
        """
        try:
            end = await self._play(job)
            await self._end(job, end)
        except Fenced as error:
            log.warning("not wanted any more: %s", error, extra={"gid": job.gid})
        finally:
            self._held.forget(job)

    def _is_last_try(self, job: Job) -> bool:
        return job.tries >= self._run.limits.max_tries

    async def _play(self, job: Job) -> End:
        """Generate and judge a group; return how it ends. Raises Fenced, and as `run`."""
        known_tokens = 0
        group: RolloutGroup | None = None
        try:
            await self._held.wait_for_earlier(job)
            # if every try were the last one, every group would be alone
            if self._is_last_try(job) and job.tries > 1:
                self._engine.sample_alone(job.gid)
            group, known_tokens = await self._begin(job)
            made, is_kept = await self._generate(job, group)
            return self._end_of(job, made, known_tokens, is_kept=is_kept)
        # the code of a loop may raise anything, SystemExit too
        except BaseException as error:
            if _is_cancellation(error) and job in self._held.expiring | self._held.late:
                return self._end_early(job, known_tokens)
            return self._end_of_error(job, error, group)

    def _end_of(self, job: Job, group: RolloutGroup, known_tokens: int, *, is_kept: bool) -> End:
        is_expiring = job in self._held.expiring
        # members that are not too old may be kept when the group expires
        keeps_members = is_expiring and self._run.limits.retries_expired(group.task)
        keeps_members = keeps_members and bool(group.newest_by_lineage(False))
        match group.status:
            case Status.FAILED:
                return Release("failed", "\n".join(group.errors))
            case Status.ABORTED if job in self._held.late or (is_expiring and not keeps_members):
                return self._end_early(job, known_tokens)
            case Status.ABORTED if not len(group.response_ids) and not job.is_begun:
                return Release("aborted", "paused")
            case Status.ABORTED if not self._tasks[job.task].partial_rollout:
                restarted = [state for state in group.states if not has_ended(state)]
                self._count_lost(job, "expired" if is_expiring else "interrupted", restarted)
        return Submit(group, max(0, len(group.response_ids) - known_tokens), is_kept)

    def _end_early(self, job: Job, known_tokens: int) -> Release:
        if job in self._held.late:
            limit_s = self._tasks[job.task].group_time_limit_s
            message = f"{job.gid} took longer than {limit_s:g} s"
            reason = log_failure(GroupTimeout(message, hint="see [strategy] group_time_limit_s"))
            log.warning("group failed: %s", message_of(reason), extra={"gid": job.gid})
            return Release("failed", reason)
        count = partial(self._engine.ended_early, job.gid, known_tokens)
        ended = self._held.figure(job, count, count(()))
        return Release("expired", "too old for every train step", ended)

    def _end_of_error(self, job: Job, error: BaseException, group: RolloutGroup | None) -> End:
        """Return how a group ends whose loop, judge or submission raised. Raises what is no fault.

        `group`: as it was claimed.
        """
        # a submission writes keys that all groups share; only a read concerns the group alone
        begun = {*self._held.members, *self._held.submitting}
        is_shared = isinstance(error, RunDamaged) and job in begun
        if is_shared or isinstance(error, Fenced | GeneratorExit | GroupChanged | LostRun):
            raise error
        if _is_cancellation(error):
            raise error
        if isinstance(error, EngineDeadError):
            is_guilty = self._engine.blame(job.gid, is_last_try=self._is_last_try(job))
            return Release("lost" if is_guilty else "handback", str(error), error=error)
        if isinstance(error, Skip):
            log.info("skipped: %s", error.message, extra={"gid": job.gid})
            return Release("skipped", error.message, record=group.shared.extra if group else {})
        if isinstance(error, GroupAbandoned):
            return Drop(str(error))
        if isinstance(error, JudgeInterrupted):  # out of a loop of the user's, which passed it on
            return Release("aborted", str(error))
        if group:  # lengths that have changed fail a group in many ways
            group.check_unchanged()
        reason = log_failure(error)
        is_own = "\n" not in reason and not isinstance(error, RolloutMQError)
        said = message_of(reason)
        log.warning("group failed: %s", said, extra={"gid": job.gid}, exc_info=is_own)
        return Release("failed", reason)

    async def _end(self, job: Job, end: End) -> None:
        """Make the one call to the server that ends a group. Raises Fenced, and as `run`."""
        self._held.submitting.add(job)
        sampled = self._engine.token_counts.of(job.gid)
        match end:
            case Submit():
                await self._submit(job, end, sampled)
            case Drop():
                log.warning("dropped: %s", end.reason, extra={"gid": job.gid})
                drop = partial(self._run.jobs.drop, job.gid, revoke=self._worker, sampled=sampled)
                try:
                    await self._insist(drop)
                except GroupHeld as error:  # another worker has it by now
                    log.warning("not dropped: %s", error, extra={"gid": job.gid})
                    return
                self._held.figure(job, partial(self._count_lost, job, "dropped"), None)
            case Release():
                try:
                    await self._insist(
                        self._run.jobs.release, self._worker, job,
                        end.kind, end.reason, end.ended, end.record, sampled,
                    )  # fmt: skip
                except Fenced as error:
                    log.warning("not released: %s", error, extra={"gid": job.gid})
                else:
                    self._held.figure(job, partial(self._count_lost, job, FATES[end.kind]), None)
                    if end.kind == "failed":
                        await self._note_failure(job, end.reason)
                if end.error:
                    raise end.error

    async def _submit(self, job: Job, end: Submit, sampled: SampledTokens) -> None:
        result = Result(job, end.group, end.new_tokens, not end.is_kept, sampled)
        try:
            await self._submitter.submit(result)
        except Exception as error:
            await self._end(job, self._end_of_error(job, error, end.group))
            return
        self.tokens += end.new_tokens
        if end.group.status is Status.COMPLETED:
            self.done += 1
            fate = FINISHED if end.is_kept else "filtered"
            self.lengths.add(job.task, fate, end.group.lengths[end.group.in_training])
        self._failures.succeeded()

    async def _note_failure(self, job: Job, reason: str) -> None:
        """Count a failed try; keep the responses of a dead group, of few with one cause."""
        self.failed += 1
        self._failures.failed(time.monotonic())
        states = self._held.members.get(job, ())
        if not self._is_last_try(job):
            return
        said = headline(reason, 200)
        log.warning("dead after %d tries: %s", job.tries, said, extra={"gid": job.gid})
        cause = cause_of(reason)
        if self._kept[cause] >= KEPT_OF_CAUSE or self._kept.total() >= KEPT or not states:
            return
        self._kept[cause] += 1

        def keep() -> None:
            slim = [state.slim() for state in states]
            self._run.dead_letters.keep_responses(job, RolloutGroup(job.gid, job.task, slim))

        try:
            await asyncio.to_thread(keep)
        except Exception as error:  # the states of a user's loop that raised may hold anything
            log.warning("responses not kept: %s", describe(error), extra={"gid": job.gid})

    async def open(self) -> dict[str, str]:
        """Open the agent loops and judges, which may serve or load something; return their facts.

        Raises ConfigError, ModelError.
        """
        facts: dict[str, str] = {}
        for task in self._tasks.values():
            for judge in task.column_judges:
                await judge.open()
            await task.agent_loop.open()
            facts |= task.agent_loop.facts
        return facts

    def interrupt(self) -> None:
        """Interrupt agents that may be idle for long, and so would not notice a pause."""
        for task in self._tasks.values():
            task.agent_loop.interrupt()

    async def close(self) -> None:
        """Close the agent loops and judges, which may hold processes; log what they raise."""
        tasks = self._tasks.values()
        closes = [task.agent_loop.close for task in tasks]
        closes += [judge.close for task in tasks for judge in task.column_judges]
        for outcome in await asyncio.gather(*map(outcome_of, closes)):
            if outcome.error is not None:
                log.warning("an agent loop or judge was not closed: %s", describe(outcome.error))

    async def hand_back(self, job: Job) -> None:
        """Release a group that a leaving worker cancelled. If that fails, its lease runs out."""
        try:
            await asyncio.to_thread(
                self._run.jobs.release, self._worker, job, "handback", "the worker left"
            )
        except (Fenced, StoreUnavailable) as error:
            log.warning("not handed back: %s", error, extra={"gid": job.gid})

    async def _begin(self, job: Job) -> tuple[RolloutGroup, int]:
        """Return the claimed group without the responses that start again, and its counted tokens.

        The turns of a worker that died were not counted. If its tokens cannot be read (a cluster
        may lose a node), return only its prompt.
        """
        group: RolloutGroup
        try:
            read = await self._insist(self._run.buffer.read, job.payload)
            group = self._tasks[job.task].agent_loop.resume(read)
        except (PayloadMissing, WireError) as error:
            if not job.is_begun:
                raise
            log.warning("starting again from the prompt: %s", error, extra={"gid": job.gid})
            read = group = await self._insist(self._run.buffer.read, job.prompt)
        if not len(group.response_ids):
            return group, 0
        states, expired = group.states, 0
        if limit := await self._insist(self._run.buffer.age_limit, job.gid):
            discard = partial(self._count_lost, job, "expired")
            states = restart_too_old(states, limit, discard)
            expired = group.sampled_tokens - sum(s.length for each in states for s in each.spans)
        if not self._tasks[job.task].partial_rollout:
            restart_unfinished(states)
        group = group.continued(states)
        again = sum(len(s.response_ids) for s in states if not has_ended(s))
        self._engine.token_counts.resume(job.gid, again, expired)
        return group, min(len(read.response_ids), len(group.response_ids))

    async def _generate(self, job: Job, group: RolloutGroup) -> tuple[RolloutGroup, bool]:
        """Return the group sampled and judged, with the total time, and whether to train it."""
        runner = self._tasks[job.task]
        began = time.monotonic()
        spent_s = group.shared.extra.get(GROUP_TIME, 0.0)
        claimed = group.states
        drawn = await self._drawn(job) if job.is_begun else []
        loop = runner.agent_loop
        is_ours = type(loop) is SingleTurnAgentLoop
        source = LoopInput(claimed, drawn, makes_prompts=loop.makes_prompts, is_ours=is_ours)
        generate = loop.for_claim(self._run, job, group)
        states = self._held.members[job] = list(claimed)
        engine = self._engine
        weights = engine.version()
        observed = all_of(
            observer.generating(job.gid, len(states), engine.name, weights)
            for observer in self._run.observers
        )
        limit = self._held.time_limit(job, runner.group_time_limit_s)
        with observed, engine.shown(job.gid, group.multimodal), limit:
            tries = self._run.limits.max_tries - job.tries + 1

            def discard(failed: Sequence[RolloutState]) -> None:
                self._count_lost(job, "failed", failed)
                for reason in {state.index: state.error or "" for state in failed}.values():
                    self.retries.add(job.task, reason)

            made = await runner.generate_each(
                states, engine, job.gid, source, generate, tries, discard
            )
        check_weights(claimed, made, engine.sampled_with)
        self._held.members[job] = made
        if not runner.partial_rollout:
            restart_unfinished(made)
        is_kept = True
        if all(state.status is Status.COMPLETED for state in made):
            try:
                is_kept = await runner.finish(made)
            except JudgeInterrupted:  # judged and filtered again at its next claim
                for state in made:
                    state.status = Status.ABORTED
        large = [column for column in all_columns() if column.is_large]
        if any(column.get(state) is not None for column in large for state in made):
            await asyncio.to_thread(self._run.columns.put_large, made, job.gid, job.token)
        result = group.continued(made)
        total_s = round(spent_s + time.monotonic() - began, 6)
        result.shared.extra = {**result.shared.extra, GROUP_TIME: total_s}
        return result, is_kept

    async def _drawn(self, job: Job) -> list[RolloutState]:
        """Return the rollouts of a begun group as they were drawn; [] if they are lost."""
        try:
            return (await self._insist(self._run.buffer.read, job.prompt)).states
        except (PayloadMissing, WireError) as error:
            log.warning("going on without its prompt: %s", error, extra={"gid": job.gid})
            return []

    def _count_lost(self, job: Job, fate: str, states: Sequence[RolloutState]) -> None:
        """Count the responses of members, which no step trains."""
        ended, cut = self._engine.lengths(job.gid, states)
        self.lengths.add(job.task, fate, ended)
        self.lengths.add(job.task, fate + CUT, cut)

    async def _insist(self, call: Callable[..., T], *args: Any) -> T:
        """Repeat `call` while the server is unreachable."""
        while True:
            try:
                answer = await asyncio.to_thread(call, *args)
            except StoreUnavailable as error:
                self._outage.report(error.hint)
            else:
                self._outage.report("")
                return answer


def _is_cancellation(error: BaseException) -> bool:
    """Return whether the current task was cancelled from outside, not by what runs in it."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and bool(task and task.cancelling())
