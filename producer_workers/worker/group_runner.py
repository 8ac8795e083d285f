"""What a worker does with one group, from its claim to its submit or release.

Invariant: a group ends in exactly one call to the server, a submit or a release, repeated while the
server is unreachable. An engine that dies costs each group that it was sampling a try; last tries
run alone, so only the prompt that kills engines becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from buffer.control.length_counts import CUT, FINISHED, LengthCounts
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
    StoreUnavailable,
    WireError,
    describe,
)
from buffer.failure_text import cause_of, headline, message_of
from buffer.job import EndedEarly, Job, ReleaseKind, Result
from buffer.observers import all_of
from buffer.redis.connection.retry import LogOnce
from buffer.run import Run
from buffer.wire.group import GROUP_TIME, RolloutGroup
from buffer.wire.rollout import RolloutState, Status, has_ended
from producer_workers.engines.base import Engine, EngineDeadError, shown
from producer_workers.user_code.failure import log_failure
from producer_workers.user_code.user_function import outcome_of
from producer_workers.worker.claims import FailureBackoff
from producer_workers.worker.held_groups import HeldGroups
from producer_workers.worker.loop_border import LoopInput, check_weights
from producer_workers.worker.shared_engine import SharedEngine
from producer_workers.worker.submitter import Submitter
from producer_workers.worker.task_runner import TaskRunner, restart_too_old, restart_unfinished
from producer_workers.worker.turn_keeper import TurnKeeper

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
}


class GroupRunner:
    """Generates, judges and submits the groups of one worker."""

    def __init__(
        self,
        run: Run,
        engine: SharedEngine,
        held: HeldGroups,
        runners: Mapping[str, TaskRunner],
        worker: str,
        failures: FailureBackoff,
    ) -> None:
        self._run = run
        self._engine = engine
        self._held = held
        self._runners = runners
        self._worker = worker
        self._failures = failures
        self._submitter = Submitter(run, worker)
        self.tokens = self.done = self.failed = 0
        self.lengths = LengthCounts()
        self._kept = Counter[str]()  # dead letters with their responses, by cause
        self._outage = LogOnce(log, "waiting for the server with groups that are held")

    async def run(self, job: Job) -> None:
        """Generate and judge one group, and submit it.

        Raises EngineDeadError, GroupChanged, LostRun, and RunDamaged where the result cannot be
        submitted. Any other failure only releases the group.
        """
        known_tokens = 0
        group: RolloutGroup | None = None
        try:
            self._isolate_last_try(job)
            group, known_tokens = await self._begin(job)
            made, is_kept = await self._generate(job, group)
            await self._finish(job, made, known_tokens, is_kept=is_kept)
        except Fenced as error:
            log.warning("result not wanted: %s", error, extra={"gid": job.gid})
        except EngineDeadError as error:
            kind: ReleaseKind = "lost" if self._may_have_killed_engine(job) else "handback"
            # counted once: the worker may claim it again before it knows that its engine is dead
            self._engine.sampled_at_death.discard(job.gid)
            await self._release(job, kind, str(error))
            raise
        except GroupAbandoned as error:
            self._held.figure(job, partial(self._count_lost, job, "dropped"), None)
            await self._drop(job, str(error))
        except JudgeInterrupted as error:  # out of a loop of the user's own, which passed it on
            await self._release(job, "aborted", str(error))
        # the code of a loop may raise anything, SystemExit too: counted, and kept with its reason
        except BaseException as error:
            is_cancelled = _is_cancellation(error)
            if is_cancelled and job in self._held.expiring | self._held.late:
                await self._end_early(job, known_tokens)
                return
            # a submission writes keys that all groups share; only a read concerns the group alone
            begun = {*self._held.members, *self._held.submitting}
            is_shared = isinstance(error, RunDamaged) and job in begun
            is_shared |= isinstance(error, GeneratorExit | GroupChanged | LostRun)
            if is_cancelled or is_shared:
                raise
            if group:  # lengths that have changed fail a group in many ways
                group.check_unchanged()
            reason = log_failure(error)
            is_own = "\n" not in reason and not isinstance(error, RolloutMQError)
            said = message_of(reason)
            log.warning("group failed: %s", said, extra={"gid": job.gid}, exc_info=is_own)
            await self._fail(job, reason, self._held.members.get(job, ()))
        finally:
            self._held.forget(job)

    def _isolate_last_try(self, job: Job) -> None:
        # if every try were the last one, every group would be alone
        if job.tries >= self._run.limits.max_tries > 1:
            self._engine.alone.add(job.gid)

    async def open(self) -> None:
        """Open the agent loops and judges, which may serve or load something.

        Raises ConfigError, ModelError.
        """
        for runner in self._runners.values():
            for judge in runner.column_judges:
                await judge.open()
            opens = getattr(runner.agent_loop, "open", None)
            if inspect.iscoroutinefunction(opens):
                await opens()

    def interrupt(self) -> None:
        """Interrupt agents that may be idle for long, and so would not notice a pause."""
        for runner in self._runners.values():
            if callable(end := getattr(runner.agent_loop, "interrupt", None)):
                end()

    async def close(self) -> None:
        """Close the agent loops and judges, which may hold processes; log what they raise."""
        runners = self._runners.values()
        closes = [getattr(runner.agent_loop, "close", None) for runner in runners]
        closes += [judge.close for runner in runners for judge in runner.column_judges]
        closing = map(outcome_of, filter(inspect.iscoroutinefunction, closes))
        for outcome in await asyncio.gather(*closing):
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
            group = self._runners[job.task].with_turns(read)
        except (PayloadMissing, WireError) as error:
            if not job.is_begun:
                raise
            log.warning("starting again from the prompt: %s", error, extra={"gid": job.gid})
            read = group = await self._insist(self._run.buffer.read, job.prompt)
        if not len(group.response_ids):
            return group, 0
        states = group.states
        if limit := await self._insist(self._run.buffer.age_limit, job.gid):
            discard = partial(self._count_lost, job, "expired")
            states = restart_too_old(states, limit, discard)
        if not self._runners[job.task].partial_rollout:
            restart_unfinished(states)
        group = group.continued(states)
        return group, min(len(read.response_ids), len(group.response_ids))

    async def _generate(self, job: Job, group: RolloutGroup) -> tuple[RolloutGroup, bool]:
        """Return the group sampled and judged, with the total time, and whether to train it."""
        runner = self._runners[job.task]
        began = time.monotonic()
        spent_s = group.shared.extra.get(GROUP_TIME, 0.0)
        claimed = group.states
        drawn = await self._drawn(job) if job.is_begun else []
        makes_prompts = getattr(runner.agent_loop, "makes_prompts", False)
        more: dict[str, Any] = {}
        if getattr(runner.agent_loop, "keeps_turns", False):
            more["keeper"] = TurnKeeper(self._run, job, group)
        source = LoopInput(claimed, drawn, makes_prompts=makes_prompts, more=more)
        states = self._held.members[job] = list(claimed)
        engine = cast(Engine, self._engine)
        weights = engine.version()
        observed = all_of(
            observer.generating(job.gid, len(states), engine.name, weights)
            for observer in self._run.observers
        )
        limit = self._held.time_limit(job, runner.group_time_limit_s)
        with observed, shown(engine, job.gid, group.multimodal), limit:
            tries = self._run.limits.max_tries - job.tries + 1
            discard = partial(self._count_lost, job, "failed")
            made = await runner.generate_each(states, engine, job.gid, source, tries, discard)
        check_weights(claimed, made, self._engine.sampled_with)
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

    def _may_have_killed_engine(self, job: Job) -> bool:
        """Return whether the engine's death uses up a try of this group."""
        # a last try only if it was alone: no group ends because of another one
        is_last = job.tries >= self._run.limits.max_tries
        was_sampled = job.gid in self._engine.sampled_at_death
        return was_sampled and (not is_last or job.gid in self._engine.alone)

    async def _finish(
        self, job: Job, group: RolloutGroup, known_tokens: int, *, is_kept: bool
    ) -> None:
        status = group.status
        if status is Status.FAILED:
            await self._fail(job, "\n".join(group.errors), group.states)
        elif status is Status.ABORTED and (
            job in self._held.late
            or (job in self._held.expiring and not self._keeps_members(group))
        ):
            await self._end_early(job, known_tokens)
        elif status is Status.ABORTED and not len(group.response_ids) and not job.is_begun:
            await self._release(job, "aborted", "paused")
        else:
            if status is Status.ABORTED and not self._runners[job.task].partial_rollout:
                fate = "expired" if job in self._held.expiring else "interrupted"
                restarted = [state for state in group.states if not has_ended(state)]
                self._count_lost(job, fate, restarted)
            self._held.submitting.add(job)
            new_tokens = max(0, len(group.response_ids) - known_tokens)
            await self._submitter.submit(Result(job, group, new_tokens, not is_kept))
            self.tokens += new_tokens
            if status is Status.COMPLETED:
                self.done += 1
                fate = FINISHED if is_kept else "filtered"
                self.lengths.add(job.task, fate, group.lengths[group.in_training])
            self._failures.succeeded()

    def _keeps_members(self, group: RolloutGroup) -> bool:
        """Return whether members that are not too old may be kept when the group expires."""
        return self._run.limits.retries_expired(group.task) and bool(group.newest_by_lineage(False))

    async def _end_early(self, job: Job, known_tokens: int) -> None:
        if job in self._held.late:
            limit_s = self._runners[job.task].group_time_limit_s
            message = f"{job.gid} took longer than {limit_s:g} s"
            reason = log_failure(GroupTimeout(message, hint="see [strategy] group_time_limit_s"))
            log.warning("group failed: %s", message_of(reason), extra={"gid": job.gid})
            await self._fail(job, reason, self._held.members.get(job, ()))
            return
        count = partial(self._engine.ended_early, job.gid, known_tokens)
        ended = self._held.figure(job, count, count(()))
        await self._release(job, "expired", "too old for every train step", ended)

    async def _release(
        self, job: Job, kind: ReleaseKind, reason: str, ended: EndedEarly | None = None
    ) -> bool:
        """Release a group. Return whether its lease still held."""
        self._held.submitting.add(job)
        try:
            await self._insist(self._run.jobs.release, self._worker, job, kind, reason, ended)
        except Fenced as error:
            log.warning("not released, its lease was lost: %s", error, extra={"gid": job.gid})
            return False
        self._held.figure(job, partial(self._count_lost, job, FATES[kind]), None)
        if kind == "failed":
            self.failed += 1
            self._failures.failed(time.monotonic())
        return True

    def _count_lost(self, job: Job, fate: str, states: Sequence[RolloutState]) -> None:
        """Count the responses of members, which no step trains."""
        ended, cut = self._engine.lengths(job.gid, states)
        self.lengths.add(job.task, fate, ended)
        self.lengths.add(job.task, fate + CUT, cut)

    async def _drop(self, job: Job, reason: str) -> None:
        self._held.submitting.add(job)
        log.warning("dropped: %s", reason, extra={"gid": job.gid})
        try:
            await self._insist(partial(self._run.jobs.drop, job.gid, revoke=self._worker))
        except GroupHeld as error:  # another worker has it by now
            log.warning("not dropped: %s", error, extra={"gid": job.gid})

    async def _fail(self, job: Job, reason: str, states: Sequence[RolloutState]) -> None:
        """Release a failed group; keep its responses if it is dead now, one of few of its cause."""
        is_last = job.tries >= self._run.limits.max_tries
        if not await self._release(job, "failed", reason) or not is_last:
            return
        said = headline(reason, 200)
        log.warning("dead after %d tries: %s", job.tries, said, extra={"gid": job.gid})
        cause = cause_of(reason)
        if self._kept[cause] >= KEPT_OF_CAUSE or self._kept.total() >= KEPT or not states:
            return
        self._kept[cause] += 1
        try:
            await asyncio.to_thread(self._keep, job, states)
        except Exception as error:  # the states of a user's loop that raised may hold anything
            log.warning("responses not kept: %s", describe(error), extra={"gid": job.gid})

    def _keep(self, job: Job, states: Sequence[RolloutState]) -> None:
        slim = [state.slim() for state in states]
        self._run.dead_letters.keep_responses(job, RolloutGroup(job.gid, job.task, slim))

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
