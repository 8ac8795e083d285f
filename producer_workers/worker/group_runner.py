"""What a worker does with one group, from its claim to its submit or release.

Invariant: a group ends in exactly one call to the server, a submit or a release. While the server
is unreachable that call is repeated: a result that was paid for is not lost to an outage.

An engine that dies uses up a try of everything that it was sampling, since one of these groups may
have killed it. Which one is found by the last try, which is made alone: a prompt that kills engines
becomes a dead letter, and no group beside it does.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast

import numpy as np

from buffer.control.observers import Observer, all_of
from buffer.errors import (
    Fenced,
    GroupChanged,
    GroupTimeout,
    JudgeInterrupted,
    PayloadMissing,
    RolloutMQError,
    RunDamaged,
    StoreUnavailable,
    WireError,
    describe,
)
from buffer.model.job import EndedEarly, Job, ReleaseKind, Result
from buffer.redis.connection.retry import LogOnce
from buffer.redis.media_folder import MediaFolder
from buffer.rollouts.group import GROUP_TIME, RolloutGroup
from buffer.rollouts.rollout import PolicyVersion, RolloutState, Status, has_ended
from buffer.rollouts.staleness import AgeLimit
from buffer.run import Run
from producer_workers.agent_loops.agent_loop import AgentLoop
from producer_workers.engines.base import Engine, EngineDeadError, shown
from producer_workers.user_code.contained_tasks import Contained
from producer_workers.worker.claims import FailureBackoff
from producer_workers.worker.loop_border import Drawn, GroupFilter, check_result, check_weights
from producer_workers.worker.shared_engine import SharedEngine
from producer_workers.worker.submitter import Submitter

log = logging.getLogger("rolloutmq.worker")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """How a worker treats the groups of one task.

    `is_valid_sample`: None accepts every completed group. `group_time_limit_s`: None for no limit.
    `on_failed_member`: see `generate_each`.
    """

    agent_loop: AgentLoop
    partial_rollout: bool = False
    is_valid_sample: GroupFilter | None = None
    group_time_limit_s: float | None = None
    on_failed_member: Literal["drop", "train"] = "drop"
    observers: Sequence[Observer] = ()

    async def _run_loop(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        weights = engine.version()
        with all_of(
            observer.generating(gid, len(states), engine.name, weights)
            for observer in self.observers
        ):
            return await self.agent_loop.generate_group(states, engine, gid)

    async def generate(
        self, states: list[RolloutState], engine: Engine, gid: str, drawn: Drawn
    ) -> list[RolloutState]:
        """Run the agent loop on one group, see `AgentLoop.generate_group`.

        In `states` are the copies that the loop works on until it ends. Raises GroupTimeout when
        the time is up; its requests are aborted then.
        """
        makes_prompts = getattr(self.agent_loop, "makes_prompts", False)
        given = list(states)
        states[:] = drawn.lend(given, makes_prompts=makes_prompts)
        try:
            async with asyncio.timeout(self.group_time_limit_s) as limit:
                made = await Contained(self._run_loop(list(states), engine, gid))
            return check_result(drawn, given, made, makes_prompts=makes_prompts)
        except BaseExceptionGroup as errors:  # of a loop that has a TaskGroup
            raise _most_important(errors) from errors
        except TimeoutError as error:
            if not limit.expired():
                raise
            message = f"{gid} took longer than {self.group_time_limit_s:g} s"
            raise GroupTimeout(message, hint="see [strategy] group_time_limit_s") from error

    async def generate_each(
        self, states: list[RolloutState], engine: Engine, gid: str, drawn: Drawn, tries: int
    ) -> list[RolloutState]:
        """Run the agent loop, and again for members that failed, up to `tries` times in all.

        Their siblings keep what they have. A group in which all failed is returned at once. After
        the last try, the group is returned as it is, or without the failed members if the task
        trains such groups and at least 2 are left. Raises what `generate` raises.
        """
        while True:
            made = await self.generate(states, engine, gid, drawn)
            failed = {state.index: state.error for state in made if state.status is Status.FAILED}
            others = [state for state in made if state.index not in failed]
            if not failed or not others:
                return made
            for index, error in failed.items():
                log.warning("rollout %d failed: %s", index, error, extra={"gid": gid})
            tries -= 1
            if any(map(is_interrupted, others)):
                made = restart(made, failed)
                for state in made:
                    if state.index in failed:
                        interrupt(state)
                return made
            if tries > 0:
                states[:] = restart(made, failed)
            elif self.on_failed_member == "train" and len({s.index for s in others}) > 1:
                states[:] = others
                if all(state.status is Status.COMPLETED for state in others):
                    return others
            else:
                return made

    async def close(self) -> None:
        """End what the agent loop keeps, such as processes of tools, where it has a `close`."""
        close = getattr(self.agent_loop, "close", None)
        if inspect.iscoroutinefunction(close):
            await close()

    async def is_valid(self, group: RolloutGroup) -> bool:
        """Return whether a completed group is worth training on, see `GroupFilter.keeps`."""
        return self.is_valid_sample is None or await self.is_valid_sample.keeps(group.states)


def _most_important(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error to raise for several: the engine's death before all others."""
    found: BaseException = errors.subgroup(EngineDeadError) or errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


class GroupRunner:
    """Runs the groups of one worker: generate, judge, submit.

    `tokens`, `done` and `failed` count generated tokens, completed groups and failed groups.
    `submitting`: jobs whose last call is under way. The server may have ended their leases because
    that call arrived. `doomed`: jobs to release as expired when they are aborted or cancelled.
    """

    def __init__(
        self, run: Run, engine: SharedEngine, runners: Mapping[str, TaskRunner], worker: str
    ) -> None:
        self._run = run
        self._engine = engine
        self._runners = runners
        self._worker = worker
        self._submitter = Submitter(run, worker)
        self.tokens = self.done = self.failed = 0
        self.failures = FailureBackoff()
        self.submitting: set[Job] = set()
        self.doomed: set[Job] = set()
        self._outage = LogOnce(log, "waiting for the server with groups that are held")
        self._members: dict[Job, list[RolloutState]] = {}

    def shares(self, jobs: Iterable[Job]) -> dict[Job, float]:
        """Return the share of each group's members that may still need the engine.

        It is 1 until the group's payload is read.
        """
        return {job: figure(open_share, self._members.get(job, ()), 1.0) for job in jobs}

    def judging(self) -> int:
        """Return how many groups only wait for their judge. Any thread may call it."""
        return sum(figure(waits_for_judge, each, False) for each in list(self._members.values()))

    def oldest(self, jobs: Iterable[Job]) -> dict[Job, PolicyVersion]:
        """Return the oldest weights of each group that has tokens. Any thread may call it."""
        found = {}
        for job in jobs:
            began = self._engine.tokens.began(job.gid)
            find = partial(oldest_weights, began=began)
            found[job] = figure(find, self._members.get(job, ()), began)
        return {job: weights for job, weights in found.items() if weights}

    async def run(self, job: Job) -> None:
        """Generate, judge and submit one group.

        Raises EngineDeadError, GroupChanged, and RunDamaged where the result cannot be submitted:
        any other failure is the group's own, and is released.
        """
        known_tokens = 0
        group: RolloutGroup | None = None
        try:
            group = await self._begin(job)
            known_tokens = len(group.response_ids)
            made = await self._generate(job, group)
            await self._finish(job, made, known_tokens)
        except Fenced as error:
            log.warning("result not wanted: %s", error, extra={"gid": job.gid})
        except EngineDeadError as error:
            kind: ReleaseKind = "lost" if self._is_guilty(job) else "handback"
            # counted once: the worker may claim it again before it knows that its engine is dead
            self._engine.suspects.discard(job.gid)
            await self._release(job, kind, str(error))
            raise
        except JudgeInterrupted as error:  # out of a loop of the user's own, which passed it on
            await self._release(job, "aborted", str(error))
        # the code of a loop may raise anything, SystemExit too: counted, and kept with its reason
        except BaseException as error:
            is_cancelled = _is_cancellation(error)
            if is_cancelled and job in self.doomed:
                await self._end_early(job, known_tokens)
                return
            # what a submission finds damaged, all groups share; what is read is the group's own
            is_shared = isinstance(error, RunDamaged) and job in self._members
            if isinstance(error, GeneratorExit | GroupChanged) or is_cancelled or is_shared:
                raise
            if group:  # lengths that have changed fail a group in many ways
                group.check_unchanged()
            is_unknown = not isinstance(error, RolloutMQError)
            reason = describe(error)  # the text of a user's error may raise
            log.warning("group failed: %s", reason, extra={"gid": job.gid}, exc_info=is_unknown)
            await self._release(job, "failed", reason)
        finally:
            self.submitting.discard(job)
            self.doomed.discard(job)
            self._members.pop(job, None)
            self._engine.alone.discard(job.gid)
            self._engine.tokens.forget(job.gid)

    async def close(self) -> None:
        """Close the agent loops. What one raises is logged: the worker leaves."""
        closing = (runner.close() for runner in self._runners.values())
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if error is not None:
                log.warning("an agent loop could not be closed: %s", describe(error))

    async def hand_back(self, job: Job) -> None:
        """Release a group whose work was cancelled because the worker leaves.

        If that fails, its lease runs out.
        """
        try:
            await asyncio.to_thread(
                self._run.jobs.release, self._worker, job, "handback", "the worker left"
            )
        except (Fenced, StoreUnavailable) as error:
            log.warning("not handed back: %s", error, extra={"gid": job.gid})

    async def _begin(self, job: Job) -> RolloutGroup:
        """Return the group as it was claimed, without the responses that start again."""
        group = await self._read(job)
        if not len(group.response_ids):
            return group
        states = group.states
        if limit := await self._insist(self._run.buffer.age_limit, job.gid):
            states = restart_too_old(states, limit)
        if not self._runners[job.task].partial_rollout:
            restart_unfinished(states)
        return group.continued(states)

    async def _read(self, job: Job) -> RolloutGroup:
        """Return the group as it was claimed, or only its prompt if its tokens are not readable.

        They may be garbage, or lost with a node of a cluster.
        """
        try:
            return await self._insist(self._run.buffer.read, job.payload)
        except (PayloadMissing, WireError) as error:
            if not job.is_begun:
                raise
            log.warning("starting again from the prompt: %s", error, extra={"gid": job.gid})
            return await self._insist(self._run.buffer.read, job.prompt)

    async def _prompt(self, job: Job) -> list[RolloutState]:
        """Return the rollouts of a begun group as they were drawn; none where that is lost."""
        if not job.is_begun:
            return []
        try:
            return (await self._insist(self._run.buffer.read, job.prompt)).states
        except (PayloadMissing, WireError) as error:
            log.warning("going on without its prompt: %s", error, extra={"gid": job.gid})
            return []

    async def _generate(self, job: Job, group: RolloutGroup) -> RolloutGroup:
        """Return the group sampled and judged, with the time that this took in all."""
        # if every try were the last one, every group would be alone
        if job.tries >= self._run.limits.max_tries > 1:
            self._engine.alone.add(job.gid)
        began = time.monotonic()
        spent_s = group.shared.extra.get(GROUP_TIME, 0.0)
        claimed = group.states
        drawn = Drawn(claimed, await self._prompt(job))
        states = self._members[job] = list(claimed)
        engine = cast(Engine, self._engine)
        with shown(engine, job.gid, group.multimodal):
            tries = self._run.limits.max_tries - job.tries + 1
            runner = self._runners[job.task]
            made = await runner.generate_each(states, engine, job.gid, drawn, tries)
        check_weights(claimed, made, self._engine.sampled_with)
        self._members[job] = made
        if not self._runners[job.task].partial_rollout:
            restart_unfinished(made)
        await asyncio.to_thread(put_experts_into_files, made, self._run.media, job.gid, job.token)
        result = group.continued(made)
        total_s = round(spent_s + time.monotonic() - began, 6)
        result.shared.extra = {**result.shared.extra, GROUP_TIME: total_s}
        return result

    def _is_guilty(self, job: Job) -> bool:
        """Return whether the engine's death uses up a try of this group."""
        # of a last try only if it was alone: no group ends for what another one did
        is_last = job.tries >= self._run.limits.max_tries
        return job.gid in self._engine.suspects and (not is_last or job.gid in self._engine.alone)

    async def _finish(self, job: Job, group: RolloutGroup, known_tokens: int) -> None:
        """Submit or release a group that the agent loop has returned."""
        runner = self._runners[job.task]
        status = group.status
        filtered = False
        if status is Status.COMPLETED:
            try:
                filtered = not await runner.is_valid(group)
            except JudgeInterrupted:  # judged and filtered again at its next claim
                status = Status.ABORTED
                group.set_status(status)
        self.submitting.add(job)
        if status is Status.FAILED:
            await self._release(job, "failed", "; ".join(group.errors))
        elif status is Status.ABORTED and job in self.doomed and not self._keeps_members(group):
            await self._end_early(job, known_tokens)
        elif status is Status.ABORTED and not len(group.response_ids) and not job.is_begun:
            await self._release(job, "aborted", "paused")
        else:
            new_tokens = max(0, len(group.response_ids) - known_tokens)
            await self._submitter.submit(Result(job, group, new_tokens, filtered))
            self.tokens += new_tokens
            self.done += status is Status.COMPLETED
            self.failures.succeeded()

    def _keeps_members(self, group: RolloutGroup) -> bool:
        """Return whether members that are not too old may be kept when the group expires."""
        return self._run.limits.retries_expired(group.task) and bool(group.newest_by_lineage(False))

    async def _end_early(self, job: Job, known_tokens: int) -> None:
        """Release a group that can serve no train step any more."""
        self.submitting.add(job)
        members = self._members.get(job, ())
        count = partial(self._engine.tokens.ended_early, job.gid, known_tokens)
        ended = figure(count, members, count(()))
        await self._release(job, "expired", "too old for every train step", ended)

    async def _release(
        self, job: Job, kind: ReleaseKind, reason: str, ended: EndedEarly | None = None
    ) -> None:
        try:
            await self._insist(self._run.jobs.release, self._worker, job, kind, reason, ended)
            if kind == "failed":
                self.failed += 1
                self.failures.failed(time.monotonic())
        except Fenced as error:
            log.warning("not released, its lease was lost: %s", error, extra={"gid": job.gid})

    async def _insist(self, call: Callable[..., T], *args: Any) -> T:
        """Return the answer of `call`, repeated while the server is unreachable."""
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


UNJUDGED = (Status.INIT, Status.ABORTED)
"""Statuses of a sampled rollout whose judge has not answered yet."""


def figure(
    compute: Callable[[Sequence[RolloutState]], T], members: Sequence[RolloutState], fallback: T
) -> T:
    """Return `compute(members)`, or `fallback` where a user's loop has put rubbish into them.

    The group fails for that rubbish when the loop returns (`check_result`).
    """
    try:
        return compute(members)
    except Exception:  # any field of a member may be anything
        return fallback


def open_share(members: Sequence[RolloutState]) -> float:
    """Return the share of the members that may still need the engine."""
    if not members:
        return 1.0
    return sum(not has_ended(member) for member in members) / len(members)


def waits_for_judge(members: Sequence[RolloutState]) -> bool:
    """Return whether all members are sampled, and some are without their judge's answer."""
    return not open_share(members) and any(member.status in UNJUDGED for member in members)


def oldest_weights(
    states: Iterable[RolloutState], began: PolicyVersion | None
) -> PolicyVersion | None:
    """Return the oldest weights in the tokens of a group; None if it has none.

    The first tokens of a rollout are its oldest: weights of a lineage that was abandoned come
    before those of the fork.
    """
    first = [span for state in states for span in state.spans[:1]]
    weights = [PolicyVersion(span.lineage, span.version) for span in first]
    return min([*weights, *([began] if began else [])], key=lambda w: w.version, default=None)


def restart_too_old(states: Sequence[RolloutState], limit: AgeLimit) -> list[RolloutState]:
    """Return the members of a claimed group, those that are too old without their response.

    A session with a segment that is too old starts again as a whole, as one member.
    """
    return restart(
        states,
        {s.index for s in states if s.status is Status.EXPIRED or limit.is_too_old(s)},
    )


def restart(states: Sequence[RolloutState], indexes: Collection[int]) -> list[RolloutState]:
    """Return the members, those of `indexes` without their response: one for each of them."""
    firsts = {state.index: state for state in reversed(states)}
    for index in indexes:
        firsts[index].reset_response()
    return [state for state in states if state.index not in indexes or firsts[state.index] is state]


def restart_unfinished(states: Iterable[RolloutState]) -> None:
    """Discard the response of each interrupted member of a task without partial rollout."""
    for state in filter(is_interrupted, states):
        state.reset_response()
        interrupt(state)


def is_interrupted(state: RolloutState) -> bool:
    """Return whether a pause ended a rollout before its response was complete."""
    return state.status is Status.ABORTED and not has_ended(state)


def interrupt(state: RolloutState) -> None:
    """Mark a rollout as one that a pause ended."""
    state.status = Status.ABORTED
    state.finish_reason = "abort"


INLINE_BYTES = 64 << 10
"""Routed experts of at most this size stay in their column: a file costs more than it saves."""


def put_experts_into_files(
    states: Sequence[RolloutState], media: MediaFolder | None, gid: str, token: str
) -> None:
    """Move the routed experts of completed rollouts into the run's media folder, if it has one.

    For a large model they are megabytes per rollout. `token`: of the claim, so that a slow worker
    cannot overwrite the files of a later one.
    """
    if media is None:
        return
    for position, state in enumerate(states):
        experts = state.routed_experts
        if not isinstance(experts, np.ndarray) or experts.nbytes <= INLINE_BYTES:
            continue
        # an interrupted rollout keeps its column: the next worker needs its rows
        if state.status is Status.COMPLETED:
            file = io.BytesIO()
            np.save(file, experts, allow_pickle=False)
            name = f"experts-{token}-{position}.npy"
            state.routed_experts = media.put(gid, name, file.getbuffer())
