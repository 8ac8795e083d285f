"""What a worker does with one group, from its claim to its submit.

Invariant: a group ends in exactly one call to the server, a submit or a release, and while the server is away that
call is repeated, not given up: a result that was paid for is not lost to an outage.

An engine that dies costs a try whatever it was sampling, since one of these may have killed it. Which one is found by
the last try, which is made alone: so a prompt that kills engines becomes a dead letter, and nothing beside it does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from buffer.errors import Fenced, PayloadMissing, RolloutMQError, StoreUnavailable, WireError
from buffer.group import GROUP_TIME, RolloutGroup
from buffer.job import Job, ReleaseKind
from buffer.rollout import RolloutState, Status
from buffer.run import Run
from producer_workers.engines.base import Engine, EngineDeadError
from producer_workers.expert_files import put_experts_into_files
from producer_workers.images.shown import shown
from producer_workers.said_once import SaidOnce
from producer_workers.shared_engine import SharedEngine
from producer_workers.task_runner import TaskRunner

log = logging.getLogger("rolloutmq.worker")
T = TypeVar("T")
ENDED = frozenset({"stop", "length"})
"""Reasons after which a rollout asks the engine for nothing more, unless its group starts again."""
UNJUDGED = frozenset({Status.INIT, Status.ABORTED})
"""Of a rollout that has ended: its judge has not answered yet."""


class GroupWork:
    """The work of one worker. `tokens`, `done` and `failed` count what it made: tokens, completed and failed groups.

    `handing_in`: jobs whose last call is on its way. The server may have ended their leases because it arrived.
    """

    def __init__(self, run: Run, engine: SharedEngine, runners: Mapping[str, TaskRunner], worker_id: str) -> None:
        self._run, self._engine, self._runners, self._worker = run, engine, runners, worker_id
        self.tokens = self.done = self.failed = 0
        self.handing_in: set[Job] = set()
        self._held = SaidOnce(log, "holding on to groups")
        self._members: dict[Job, list[RolloutState]] = {}

    def shares(self, jobs: Iterable[Job]) -> dict[Job, float]:
        """The share of each group's members that may still need the engine: all, before its payload is read."""
        return {job: _open_share(self._members.get(job, ())) for job in jobs}

    def judging(self) -> int:
        """Return how many groups only wait for their judge. Called on the heartbeat's thread, too."""
        return sum(map(_is_judged, list(self._members.values())))

    async def do(self, job: Job) -> None:
        """Generate, judge and hand in one group. Its failure is its own; EngineDeadError is the worker's."""
        try:
            group = await self._read(job)
            known = len(group.response_ids)
            began, spent = time.monotonic(), group.shared["extra"].get(GROUP_TIME, 0.0)
            self._members[job] = group.states
            states = self._members[job] = await self._generate(job, group)
            await asyncio.to_thread(put_experts_into_files, states, self._run.media, job.gid, job.token)
            made = RolloutGroup(job.gid, job.task, states)
            made.shared["extra"] = {**made.shared["extra"], GROUP_TIME: round(spent + time.monotonic() - began, 6)}
            await self._hand_in(job, made, known)
        except Fenced as error:
            log.warning("result not wanted: %s", error, extra={"gid": job.gid})
        except EngineDeadError as error:
            kind: ReleaseKind = "lost" if self._is_guilty(job) else "handback"
            # once: the worker may claim it again before it knows that its engine is dead
            self._engine.suspects.discard(job.gid)
            await self._release(job, kind, str(error))
            raise
        except Exception as error:  # one group's failure is not the worker's: it is counted, kept with its reason
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
        states, engine = group.states, cast(Engine, self._engine)
        with shown(engine, job.gid, states[0].multimodal):
            return await self._runners[job.task].generate(states, engine, job.gid)

    def _is_guilty(self, job: Job) -> bool:
        """Whether the engine's death costs a try: it costs nobody the last one who was not alone."""
        is_last = job.tries >= self._run.limits.max_tries
        return job.gid in self._engine.suspects and (not is_last or job.gid in self._engine.alone)

    async def hand_back(self, job: Job) -> None:
        """Give a group back whose work was cancelled, because the worker leaves; its lease runs out otherwise."""
        try:
            await asyncio.to_thread(self._run.jobs.release, self._worker, job, "handback", "the worker left")
        except (Fenced, StoreUnavailable) as error:
            log.warning("not handed back: %s", error, extra={"gid": job.gid})

    async def _read(self, job: Job) -> RolloutGroup:
        """What the group has; only its prompt, where its tokens were lost with a node of a cluster, or are garbage."""
        try:
            return await self._insist(self._run.buffer.read, job.payload)
        except (PayloadMissing, WireError) as error:
            if job.payload.token == job.prompt.token:
                raise
            log.warning("starting again from the prompt: %s", error, extra={"gid": job.gid})
            return await self._insist(self._run.buffer.read, job.prompt)

    async def _hand_in(self, job: Job, group: RolloutGroup, known: int) -> None:
        runner, status = self._runners[job.task], group.status
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
                self._held.say(error.hint)
            else:
                self._held.say("")
                return answer


def _open_share(members: Sequence[RolloutState]) -> float:
    return sum(member.finish_reason not in ENDED for member in members) / len(members) if members else 1.0


def _is_judged(members: Sequence[RolloutState]) -> bool:
    """Return whether all members are sampled, and some are without their judge's answer."""
    return not _open_share(members) and any(member.status in UNJUDGED for member in members)
