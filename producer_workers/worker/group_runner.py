"""What a worker does with one group, from its claim to its submit.

Invariant: a group ends in exactly one call to the server, a submit or a release, and while the
server is away that call is repeated, not given up: a result that was paid for is not lost to an
outage.

An engine that dies costs a try whatever it was sampling, since one of these may have killed it.
Which one is found by the last try, which is made alone: so a prompt that kills engines becomes a
dead letter, and nothing beside it does.

How a worker treats the groups of one task: the agent loop, and what becomes of what it makes.

Routed experts of finished rollouts as files of their group: for a large model they are megabytes to
a rollout.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from buffer.errors import (
    Fenced,
    GroupTimeout,
    PayloadMissing,
    RolloutMQError,
    StoreUnavailable,
    WireError,
)
from buffer.model.group import GROUP_TIME, RolloutGroup
from buffer.model.job import Job, ReleaseKind
from buffer.model.rollout import RolloutState, Status
from buffer.run import Run
from buffer.store.media_folder import MediaFolder
from buffer.store.retry import LogOnce
from producer_workers.agent_loops.agent_loop import AgentLoop
from producer_workers.engines.base import Engine, EngineDeadError, shown
from producer_workers.worker.loop_result import SampleFilter, check_result
from producer_workers.worker.shared_engine import SharedEngine


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """`is_valid_sample` None accepts every completed group; `group_time_limit_s` None waits for
    ever.
    """

    agent_loop: AgentLoop
    partial_rollout: bool = False
    is_valid_sample: SampleFilter | None = None
    group_time_limit_s: float | None = None

    async def generate(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        """See `AgentLoop.generate_group`. Raises GroupTimeout when the time is up; its requests are
        aborted then.
        """
        given = [state.index for state in states]
        try:
            async with asyncio.timeout(self.group_time_limit_s) as limit:
                made = await self.agent_loop.generate_group(states, engine, gid)
            return check_result(given, made)
        except BaseExceptionGroup as errors:  # of a loop that has a TaskGroup
            raise _one_of(errors) from errors
        except TimeoutError as error:
            if not limit.expired():
                raise
            hint = "see [strategy] group_time_limit_s"
            raise GroupTimeout(
                f"{gid} took longer than {self.group_time_limit_s:g} s", hint=hint
            ) from error

    async def is_valid(self, states: list[RolloutState]) -> bool:
        """Whether a completed group is worth training on. What the user's function raises fails the
        group.
        """
        return self.is_valid_sample is None or bool(
            await asyncio.to_thread(self.is_valid_sample, states)
        )


def _one_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to raise for several: that the engine died is the worker's matter, whatever else went
    wrong.
    """
    found: BaseException = errors.subgroup(EngineDeadError) or errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


INLINE_BYTES = 64 << 10
"""What is smaller stays a column: a file costs more than it saves."""


def put_experts_into_files(
    states: Sequence[RolloutState], media: MediaFolder | None, gid: str, token: str
) -> None:
    """Those of completed rollouts, where the run has a folder. `token`: of the claim, so that no
    later one is hit by a worker that was only slow. A rollout that goes on keeps its column: its
    old rows must be there then.
    """
    if media is None:
        return
    for place, state in enumerate(states):
        experts = state.routed_experts
        if not isinstance(experts, np.ndarray) or experts.nbytes <= INLINE_BYTES:
            continue
        if state.status is Status.COMPLETED:
            file = io.BytesIO()
            np.save(file, experts, allow_pickle=False)
            state.routed_experts = media.put(gid, f"experts-{token}-{place}.npy", file.getbuffer())


log = logging.getLogger("rolloutmq.worker")
T = TypeVar("T")
ENDED = frozenset({"stop", "length"})
"""Reasons after which a rollout asks the engine for nothing more, unless its group starts again."""
UNJUDGED = frozenset({Status.INIT, Status.ABORTED})
"""Of a rollout that has ended: its judge has not answered yet."""


class GroupWork:
    """The work of one worker. `tokens`, `done` and `failed` count what it made: tokens, completed
    and failed groups.

    `handing_in`: jobs whose last call is on its way. The server may have ended their leases because
    it arrived.
    """

    def __init__(
        self, run: Run, engine: SharedEngine, runners: Mapping[str, TaskRunner], worker_id: str
    ) -> None:
        self._run = run
        self._engine = engine
        self._runners = runners
        self._worker = worker_id
        self.tokens = self.done = self.failed = 0
        self.handing_in: set[Job] = set()
        self._held = LogOnce(log, "holding on to groups")
        self._members: dict[Job, list[RolloutState]] = {}

    def shares(self, jobs: Iterable[Job]) -> dict[Job, float]:
        """The share of each group's members that may still need the engine: all, before its payload
        is read.
        """
        return {job: _open_share(self._members.get(job, ())) for job in jobs}

    def judging(self) -> int:
        """Return how many groups only wait for their judge. Called on the heartbeat's thread, too."""
        return sum(map(_is_judged, list(self._members.values())))

    async def do(self, job: Job) -> None:
        """Generate, judge and hand in one group. Its failure is its own; EngineDeadError is the
        worker's.
        """
        try:
            group = await self._read(job)
            known = len(group.response_ids)
            began = time.monotonic()
            spent = group.shared["extra"].get(GROUP_TIME, 0.0)
            self._members[job] = group.states
            states = self._members[job] = await self._generate(job, group)
            await asyncio.to_thread(
                put_experts_into_files, states, self._run.media, job.gid, job.token
            )
            made = RolloutGroup(job.gid, job.task, states)
            made.shared["extra"] = {
                **made.shared["extra"],
                GROUP_TIME: round(spent + time.monotonic() - began, 6),
            }
            await self._hand_in(job, made, known)
        except Fenced as error:
            log.warning("result not wanted: %s", error, extra={"gid": job.gid})
        except EngineDeadError as error:
            kind: ReleaseKind = "lost" if self._is_guilty(job) else "handback"
            # once: the worker may claim it again before it knows that its engine is dead
            self._engine.suspects.discard(job.gid)
            await self._release(job, kind, str(error))
            raise
        except (
            Exception
        ) as error:  # one group's failure is not the worker's: it is counted, kept with its reason
            unknown = not isinstance(error, RolloutMQError)
            log.warning("group failed: %s", error, extra={"gid": job.gid}, exc_info=unknown)
            await self._release(job, "failed", f"{type(error).__name__}: {error}")
        finally:
            self.handing_in.discard(job)
            self._members.pop(job, None)
            self._engine.alone.discard(job.gid)

    async def _generate(self, job: Job, group: RolloutGroup) -> list[RolloutState]:
        """Sampled and judged. Where every try is the last one, to be alone would be for ever."""
        if job.tries >= self._run.limits.max_tries > 1:
            self._engine.alone.add(job.gid)
        states = group.states
        engine = cast(Engine, self._engine)
        with shown(engine, job.gid, states[0].multimodal):
            return await self._runners[job.task].generate(states, engine, job.gid)

    def _is_guilty(self, job: Job) -> bool:
        """Whether the engine's death costs a try: it costs nobody the last one who was not alone."""
        is_last = job.tries >= self._run.limits.max_tries
        return job.gid in self._engine.suspects and (not is_last or job.gid in self._engine.alone)

    async def hand_back(self, job: Job) -> None:
        """Give a group back whose work was cancelled, because the worker leaves; its lease runs out
        otherwise.
        """
        try:
            await asyncio.to_thread(
                self._run.jobs.release, self._worker, job, "handback", "the worker left"
            )
        except (Fenced, StoreUnavailable) as error:
            log.warning("not handed back: %s", error, extra={"gid": job.gid})

    async def _read(self, job: Job) -> RolloutGroup:
        """What the group has; only its prompt, where its tokens were lost with a node of a cluster,
        or are garbage.
        """
        try:
            return await self._insist(self._run.buffer.read, job.payload)
        except (PayloadMissing, WireError) as error:
            if job.payload.token == job.prompt.token:
                raise
            log.warning("starting again from the prompt: %s", error, extra={"gid": job.gid})
            return await self._insist(self._run.buffer.read, job.prompt)

    async def _hand_in(self, job: Job, group: RolloutGroup, known: int) -> None:
        runner = self._runners[job.task]
        status = group.status
        filtered = status is Status.COMPLETED and not await runner.is_valid(group.states)
        self.handing_in.add(job)
        if status is Status.FAILED:
            errors = {m["error"] for m in group.members if m.get("error")}
            await self._release(job, "failed", "; ".join(sorted(errors)))
        elif status is Status.ABORTED and not runner.partial_rollout:
            await self._release(job, "aborted", "paused")
        else:
            new_tokens = max(0, len(group.response_ids) - known)
            await self._insist(self._submit, job, group, new_tokens, filtered)
            self.tokens += new_tokens
            self.done += status is Status.COMPLETED

    def _submit(self, job: Job, group: RolloutGroup, new_tokens: int, filtered: bool) -> None:
        self._run.buffer.submit(self._worker, job, group, new_tokens, filtered=filtered)

    async def _release(self, job: Job, kind: ReleaseKind, reason: str) -> None:
        try:
            await self._insist(self._run.jobs.release, self._worker, job, kind, reason)
            self.failed += kind == "failed"
        except Fenced as error:
            log.warning("nothing to give back: %s", error, extra={"gid": job.gid})

    async def _insist(self, call: Callable[..., T], *args: Any) -> T:
        while True:
            try:
                answer = await asyncio.to_thread(call, *args)
            except StoreUnavailable as error:
                self._held.report(error.hint)
            else:
                self._held.report("")
                return answer


def _open_share(members: Sequence[RolloutState]) -> float:
    return (
        sum(member.finish_reason not in ENDED for member in members) / len(members)
        if members
        else 1.0
    )


def _is_judged(members: Sequence[RolloutState]) -> bool:
    """Return whether all members are sampled, and some are without their judge's answer."""
    return not _open_share(members) and any(member.status in UNJUDGED for member in members)
