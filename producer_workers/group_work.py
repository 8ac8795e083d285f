"""What a worker does with one group, from its claim to its submit.

Invariant: a group ends in exactly one call to the server, a submit or a release, and while the server is away that
call is repeated, not given up: a result that was paid for is not lost to an outage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from buffer.errors import Fenced, RolloutMQError, StoreUnavailable
from buffer.group import RolloutGroup
from buffer.job import Job, ReleaseKind
from buffer.rollout import Status
from buffer.run import Run
from producer_workers.agent_loops.agent_loop import AgentLoop
from producer_workers.engines.base import Engine, EngineDeadError

log = logging.getLogger("rolloutmq.worker")
T = TypeVar("T")


class GroupWork:
    """The work of one worker. `tokens` and `done` count what it made: tokens, and completed groups.

    `handing_in`: jobs whose last call is on its way. The server may have ended their leases because it arrived.
    """

    def __init__(
        self, run: Run, engine: Engine, loops: Mapping[str, AgentLoop], worker_id: str, *, partial_rollout: bool
    ) -> None:
        self._run, self._engine, self._loops = run, engine, loops
        self._worker, self._partial = worker_id, partial_rollout
        self.tokens = self.done = 0
        self.handing_in: set[Job] = set()

    async def do(self, job: Job) -> None:
        """Generate, judge and hand in one group. Its failure is its own; EngineDeadError is the worker's."""
        try:
            group = await self._insist(self._run.buffer.get, job.payload)
            known = len(group.response_ids)
            states = await self._loops[job.task].generate_group(group.states, self._engine, job.gid)
            await self._hand_in(job, RolloutGroup(job.gid, job.task, states), known)
        except Fenced as error:
            log.warning("result not wanted: %s", error, extra={"gid": job.gid})
        except EngineDeadError:
            await self._release(job, "handback", "the engine died")
            raise
        except Exception as error:  # one group's failure is not the worker's: it is counted, kept with its reason
            unknown = not isinstance(error, RolloutMQError)
            log.warning("group failed: %s", error, extra={"gid": job.gid}, exc_info=unknown)
            await self._release(job, "failed", f"{type(error).__name__}: {error}")
        finally:
            self.handing_in.discard(job)

    async def _hand_in(self, job: Job, group: RolloutGroup, known: int) -> None:
        self.handing_in.add(job)
        status = group.status
        if status is Status.FAILED:
            errors = {m["error"] for m in group.members if m.get("error")}
            await self._release(job, "failed", "; ".join(sorted(errors)))
        elif status is Status.ABORTED and not self._partial:
            await self._release(job, "aborted", "paused")
        else:
            new_tokens = max(0, len(group.response_ids) - known)
            await self._insist(self._run.buffer.submit, self._worker, job, group, new_tokens)
            self.tokens += new_tokens
            self.done += status is Status.COMPLETED

    async def _release(self, job: Job, kind: ReleaseKind, reason: str) -> None:
        try:
            await self._insist(self._run.jobs.release, self._worker, job, kind, reason)
        except Fenced as error:
            log.warning("nothing to give back: %s", error, extra={"gid": job.gid})

    async def _insist(self, call: Callable[..., T], *args: Any) -> T:
        while True:
            try:
                return await asyncio.to_thread(call, *args)
            except StoreUnavailable as error:
                log.warning("holding on to a group: %s", error)
