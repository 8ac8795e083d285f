"""Keep the run's own server alive, and record how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from buffer.errors import StoreError
from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.launch.child import STOPPED
from rolloutmq.process_ends import ProcessFailed, ProcessJournal

SERVER_S = 300.0  # in which a server that ends STOPPED times is not started again
NAME = "server"


class KeptServer:
    """The embedded server of a run. Whoever starts it leaves it by `server.leave()`."""

    def __init__(self, server: EmbeddedServer, journal: ProcessJournal) -> None:
        self.server = server
        self._journal = journal
        self._starts: list[float] = []  # again, within SERVER_S
        self._pid = 0

    @property
    def pids(self) -> list[int]:
        return [self._pid] if self._pid else []

    def start(self) -> None:
        """Start the server, or adopt the running one. Raises StoreError, OSError."""
        self.server.start()
        self._pid = self.server.pid or 0
        self._journal.started(NAME, 0, self._pid)

    def keep_alive(self, check: Callable[[], object]) -> str | None:
        """Start an ended server again; return a report. Raises ProcessFailed where that fails.

        `check` raises if the run's folder is gone: a server could not be started in it.
        """
        server, now = self.server, time.monotonic()
        if server.is_running:
            return None
        self._starts = [at_s for at_s in self._starts if now - at_s < SERVER_S]
        end = self._journal.end_of(NAME, 0, self._pid, server.reap() or 0)
        end.cause, end.fruitless = server.last_line, len(self._starts) + 1
        self._journal.ended(end)
        problem = ""
        if len(self._starts) >= STOPPED:
            problem = f"it ended {STOPPED} times within {SERVER_S:g} s"
        else:
            try:
                self.start()
            except (StoreError, OSError) as error:  # also for a full disk
                check()
                problem = str(error)
        if not problem:
            self._starts.append(now)
            return f"server restarted: it {end.how}: {end.why}{server.full_disk}"
        how = f"the Valkey server of {server.folder} {end.how}: {end.why}"
        lines = filter(None, [self._journal.full_disk(end), how, problem])
        end.is_final = True
        failed = ProcessFailed("\n  ".join(lines), end, hint=f"its log: {server.log_path}")
        failed.exit_code = StoreError.exit_code
        raise failed
