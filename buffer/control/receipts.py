"""Wait until the workers of a run have carried out a change of its control state (I10).

A receipt is the number of the control epoch that a worker has carried out; it comes with a
heartbeat or by the script `receipt`. A worker whose last heartbeat is older than a lease is dead,
and is not waited for: the next sweep takes its groups back. A live worker that stays silent for
`pause_timeout_s` is fenced if the caller asks for that (the trainer does), so that its groups wait
again; otherwise PauseTimeout names it (for commands). Time without an answer of the server does not
count, since no worker could send a receipt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from buffer.control.control import ControlState
from buffer.control.fleet import Fleet
from buffer.errors import PauseTimeout
from buffer.redis.retry import OutageClock
from buffer.redis.store import RunContext

log = logging.getLogger("rolloutmq.control")

WORKERS = 10_000  # inspected by one call of the server at most
RECEIPT_S = 20e-6
# What the server needs for one receipt, and the longest time between two polls. Receipts arrive in
# crowds: polling after each of them would keep the server from taking the others.
POLL_S = 0.01


class Receipts:
    def __init__(self, context: RunContext, fleet: Fleet) -> None:
        self._store, self._keys, self._limits, _ = context
        self._fleet = fleet

    def silent(self, epoch: int | None = None) -> list[str]:
        """Return the live workers that have not carried out `epoch`; None: the newest one."""
        _, *workers = self._store.call(
            "silent",
            self._keys.slots(),
            {"epoch": epoch, "lease_ms": self._limits.lease_ms, "limit": WORKERS},
        )
        return workers

    def wait(
        self,
        state: ControlState | None = None,
        *,
        timeout_s: float | None = None,
        fences: bool = False,
        watch: Callable[[list[str]], object] = lambda silent: None,
    ) -> float:
        """Wait until every live worker has carried out `state`; return the seconds that took.

        Without a `state`, the newest epoch counts, also if another caller changes the mode
        meanwhile. `watch` gets the silent workers after every poll, and may raise to end the wait.
        After `timeout_s` (default: the run's `pause_timeout_s`), silent workers are fenced if
        `fences`, else PauseTimeout names them.
        """
        started = time.monotonic()
        answered = OutageClock()
        epoch = None if state is None else state.epoch
        limit_s = self._limits.pause_timeout_s if timeout_s is None else timeout_s
        while True:
            silent = self.silent(epoch)
            watch(silent)
            if not silent:
                return time.monotonic() - started
            if answered.poll() > limit_s:
                if not fences:
                    raise PauseTimeout(
                        f"no receipt after {time.monotonic() - started:.1f} s from "
                        f"{', '.join(silent)}",
                        hint="run.fleet.fence(WORKER) takes a worker's groups back",
                        command_hint="`rolloutmq fence WORKER --yes` takes a worker's groups back",
                    )
                for worker in silent:
                    log.warning("no receipt in time; fencing the worker", extra={"worker": worker})
                    self._fleet.fence(worker)
            if fences:
                self._store.wait(self._keys.wake_up("receipts"), 0.1)
                time.sleep(min(POLL_S, RECEIPT_S * len(silent)))
            else:
                # a wake-up reaches one waiter: an operator who took it would delay the trainer
                time.sleep(0.05)
