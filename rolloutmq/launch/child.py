"""Start, watch, restart and stop the child processes of a run; with `--chaos`, also kill them."""

from __future__ import annotations

import os
import shutil
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
"""Exit codes after which a restart would fail in the same way."""

RESTART_DELAY_S = 5.0
"""Seconds to a restart after exit code 0: at the end of a run, others exit before the trainer."""

BACKOFF = Backoff(0.5, 10.0, jitter=0.0)
"""Pauses before a process that died is started again."""

EARLY_DEATH_S = 60.0
"""A process that dies within this time, three times in a row, is not restarted."""


class ChildFailed(RolloutMQError):
    """Raised when a process of the run ended for good; the message has the end of its log."""


class Child:
    """A `rolloutmq` command as a process in its own session, so that Ctrl-C does not reach it."""

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        log: Path,
        env: dict[str, str],
        *,
        restarts: int,
        log_bytes: int = 1 << 26,
    ) -> None:
        self.name = name
        self._args = list(args)
        self._log = log
        self._older_log = log.with_name(log.name + ".1")
        self._log_bytes = log_bytes
        self._env = env
        self._restarts_left = restarts
        self._early_deaths = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._retry_at = 0.0

    def start(self, *more: str) -> None:
        """Start the process; its output goes to its log."""
        env = os.environ | self._env | {OWNER: str(os.getpid())}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rolloutmq", *self._args, *more],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True,
            )  # fmt: skip
        self._started = time.monotonic()

    @property
    def age_s(self) -> float:
        """Return the seconds since it was started."""
        return time.monotonic() - self._started

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def succeeded(self) -> bool:
        """Return whether it ended by itself with exit code 0."""
        return self._process is not None and self._process.poll() == 0

    def keep_alive(self, *more: str) -> str | None:
        """Restart the process if it ended; return what to report.

        Raises ChildFailed if a restart is hopeless.
        """
        if self._process is None or (code := self._process.poll()) is None:
            return None
        if self._retry_at == 0.0:
            return self._note_end(code)
        if time.monotonic() < self._retry_at:
            return None
        self._retry_at = 0.0
        self.start(*more)
        return f"{self.name} restarted"

    def _note_end(self, code: int) -> str | None:
        if code == 0:
            # it saw the end of a run that has been continued since
            self._retry_at = time.monotonic() + RESTART_DELAY_S
            return None
        return self._note_death(code)

    def _note_death(self, code: int) -> str:
        self._restarts_left -= 1
        self._early_deaths = self._early_deaths + 1 if self.age_s < EARLY_DEATH_S else 0
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        hopeless = (
            code in HOPELESS or self._restarts_left < 0 or (self._early_deaths >= 3 and code > 0)
        )
        if hopeless:
            error = ChildFailed(
                f"{self.name} {how}:\n{self.log_tail()}", hint=f"its log: {self._log}"
            )
            error.exit_code = code if code > 0 else 1
            raise error
        self._retry_at = time.monotonic() + BACKOFF.pause_s(self._early_deaths)
        return f"{self.name} {how}: {self.last_error()}; its log: {self._log}"

    def last_error(self) -> str:
        """Return the newest error of its log in one line, or else the last line."""
        lines = self.log_tail(40).splitlines() or ["(no output)"]
        errors = [line for line in lines if line.startswith("error: ")]
        return f"{(errors or lines)[-1].removeprefix('error: '):.200}"

    def limit_log(self) -> None:
        """Move what is in its log to a second file, in place of the older one, if that is much.

        The process and its libraries keep the file open for appending, so it is copied and cut
        short: what they write between the two is lost.
        """
        if self._log.exists() and self._log.stat().st_size > self._log_bytes:
            shutil.copyfile(self._log, self._older_log)
            os.truncate(self._log, 0)

    def log_tail(self, lines: int = 6) -> str:
        """Return the last lines of its log."""
        tail: deque[bytes] = deque(maxlen=lines)
        for file in (self._older_log, self._log):
            if file.exists():
                with file.open("rb") as log:
                    tail.extend(log)
        return b"".join(tail).decode(errors="replace").rstrip()

    def terminate(self) -> None:
        """Send SIGTERM, so that it finishes and exits."""
        if self.pid:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> bool:
        """Kill the process, as a crash would, and return whether it was running.

        Processes that it started notice by themselves.
        """
        pid = self.pid
        if pid:
            os.kill(pid, signal.SIGKILL)
        return bool(pid)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it came in time."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Strike:
    """A process to kill once the trainer has taken `step` batches.

    `strike` kills it and returns whether it was alive.
    """

    step: int
    what: str
    strike: Callable[[], bool]


class Chaos:
    """The strikes of one run, each delivered once, all by SIGKILL."""

    def __init__(self, strikes: list[Strike]) -> None:
        self._pending = strikes
        self._planned = len(strikes)

    @classmethod
    def plan(
        cls, steps: int, workers: list[Child], trainer: Child, server: EmbeddedServer | None
    ) -> Chaos:
        """Plan a strike at each fifth of the steps: a worker, the trainer, the server, a worker."""
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

    def strike(self, taken: int) -> list[str]:
        """Deliver the next strike if it is due and hits a live process; return what to report."""
        # one at a time, so that each hits a run that has recovered from the one before
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
