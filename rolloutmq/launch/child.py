"""One child process of a run: started, watched, started again when it dies, stopped in order.

`--chaos`: kill a worker, the trainer and the server, at different moments of a real run.

All by SIGKILL. The run must end with the same account: nothing lost, nothing trained twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from buffer.errors import ConfigError, RolloutMQError, RunError
from buffer.server.embedded import EmbeddedServer
from buffer.server.process import OWNER
from buffer.store.retry import Backoff

HOPELESS = frozenset({ConfigError.exit_code, RunError.exit_code})
"""Exit codes after which starting again would only say the same again."""

COME_BACK_S = 5.0
"""A process that left in order is started again so late: at the end of a run they leave before the
trainer does.
"""

BACKOFF = Backoff(0.5, 10.0, jitter=0.0)
"""Pauses before a process that died is started again."""

QUICK_S = 15.0
"""A process that dies so young three times in a row will not get better."""


class ChildFailed(RolloutMQError):
    """A process of the run ended for good, with its own words."""


class Child:
    """A `rolloutmq` command as a process in a session of its own, so that Ctrl-C does not reach it."""

    def __init__(
        self, name: str, args: Sequence[str], log: Path, env: dict[str, str], *, restarts: int
    ) -> None:
        self.name = name
        self._args = list(args)
        self._log = log
        self._env = env
        self._restarts_left = restarts
        self._quick_deaths = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._retry_at = 0.0

    def start(self, *more: str) -> None:
        """Start it; what it says goes to its log."""
        env = os.environ | self._env | {OWNER: str(os.getpid())}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rolloutmq", *self._args, *more],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True,
            )  # fmt: skip
        self._started = time.monotonic()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def succeeded(self) -> bool:
        """It ended by itself, with exit code 0."""
        return self._process is not None and self._process.poll() == 0

    def keep_alive(self, *more: str) -> str | None:
        """Start it again if it ended; returns what to tell people. ChildFailed when that is
        hopeless.
        """
        if self._process is None or (code := self._process.poll()) is None:
            return None
        if self._retry_at == 0.0:
            return self._note_end(code)
        if time.monotonic() < self._retry_at:
            return None
        self._retry_at = 0.0
        self.start(*more)
        return f"{self.name} started again"

    def _note_end(self, code: int) -> str | None:
        if code == 0:
            # it saw the end of a run that is now going on
            self._retry_at = time.monotonic() + COME_BACK_S
            return None
        return self._note_death(code)

    def _note_death(self, code: int) -> str:
        self._restarts_left -= 1
        self._quick_deaths = (
            self._quick_deaths + 1 if time.monotonic() - self._started < QUICK_S else 0
        )
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        hopeless = (
            code in HOPELESS or self._restarts_left < 0 or (self._quick_deaths >= 3 and code > 0)
        )
        if hopeless:
            error = ChildFailed(
                f"{self.name} {how}:\n{self.last_words()}", hint=f"its whole log: {self._log}"
            )
            error.exit_code = code if code > 0 else 1
            raise error
        self._retry_at = time.monotonic() + BACKOFF.pause_s(self._quick_deaths)
        return f"{self.name} {how}"

    def last_words(self, lines: int = 6) -> str:
        """The end of its log."""
        with self._log.open("rb") as log:
            tail = deque(log, maxlen=lines)
        return b"".join(tail).decode(errors="replace").rstrip()

    def terminate(self) -> None:
        """Ask it to finish and leave."""
        if self.pid:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> bool:
        """End it now, as a crash would (only this process; what it started notices by itself).
        Whether it ran.
        """
        pid = self.pid
        if pid:
            os.kill(pid, signal.SIGKILL)
        return bool(pid)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it came in time."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Strike:
    """Something that dies once the trainer has taken `step` batches. `strike` says whether it was
    alive.
    """

    step: int
    what: str
    strike: Callable[[], bool]


class Chaos:
    """The strikes of one run, each delivered once."""

    def __init__(self, strikes: list[Strike]) -> None:
        self._pending = strikes
        self._planned = len(strikes)

    @classmethod
    def plan(
        cls, steps: int, workers: list[Child], trainer: Child, server: EmbeddedServer | None
    ) -> Chaos:
        """A worker at a fifth of the steps, the trainer at two, the server at three, another worker
        at four fifths.
        """
        strikes = [
            Strike(max(1, steps // 5), f"SIGKILL to {workers[0].name}", workers[0].kill),
            Strike(max(2, steps * 2 // 5), "SIGKILL to the trainer", trainer.kill),
        ]
        if server is not None:
            what = "SIGKILL to the server, then a restart"
            strikes.append(Strike(max(3, steps * 3 // 5), what, lambda: _crash(server)))
        strikes.append(
            Strike(max(4, steps * 4 // 5), f"SIGKILL to {workers[-1].name}", workers[-1].kill)
        )
        return cls(strikes)

    def look(self, taken: int) -> list[str]:
        """Deliver the next strike if it is due and hits something; returns what to tell people."""
        # one at a time, so that each meets a run that has seen the one before
        if not self._pending or self._pending[0].step > taken or not self._pending[0].strike():
            return []
        return [f"chaos at step {taken}: {self._pending.pop(0).what}"]

    @property
    def outcome(self) -> str:
        return (
            f"chaos: {self._planned - len(self._pending)} of {self._planned} strikes were delivered"
        )


def _crash(server: EmbeddedServer) -> bool:
    server.kill()
    server.start()
    return True
