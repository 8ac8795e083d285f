"""The wait of an idle worker for the wake-up that the server sends when jobs may be waiting."""

from __future__ import annotations

import asyncio
import logging

from buffer.errors import RolloutMQError, StoreUnavailable
from buffer.redis.connection.retry import LogOnce
from buffer.run import Run
from producer_workers.worker.inbox import Inbox, JobsMayWait, PartFailed

log = logging.getLogger("rolloutmq.worker")


class WakeUp:
    """Waits on a thread for a wake-up of the workers, and posts `JobsMayWait` after it.

    A wake-up is for one worker: one that has no vacancy must not wait for it.
    """

    def __init__(self, run: Run, inbox: Inbox) -> None:
        self._run = run
        self._inbox = inbox
        self._task: asyncio.Task[None] | None = None
        self._problem = LogOnce(log, "no wake-ups")

    @property
    def is_awaited(self) -> bool:
        """Whether a wait is under way."""
        return self._task is not None

    def wait(self, timeout_s: float) -> None:
        """Begin to wait; post `JobsMayWait` at the wake-up, or after `timeout_s` without one."""
        self._task = asyncio.create_task(self._wait(timeout_s))

    def cancel(self) -> None:
        """End the wait."""
        if self._task:
            self._task.cancel()

    async def _wait(self, timeout_s: float) -> None:
        wake_up = self._run.keys.wake_up("workers")
        try:
            await asyncio.to_thread(
                self._run.store.wait_for_wake_up, wake_up, timeout_s, shared=True
            )
            self._problem.report("")
        except StoreUnavailable as error:
            self._problem.report(error.hint)
        except RolloutMQError as error:
            self._inbox.post(PartFailed(error))
        finally:
            self._task = None
            self._inbox.post(JobsMayWait())
