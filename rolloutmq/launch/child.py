"""Start, watch, restart and stop the child processes of a run.

A life is fruitless unless its process achieved something, for which each kind has a mark:

    trainer                    the committed step
    worker, gateway            its last group that was submitted
    producer                   the started groups
    judge                      the judged groups

All but the trainer may have nothing to do, so an hour of life counts, too.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from buffer.errors import INTERRUPTED, ConfigError, RankLost, RunError
from buffer.redis.retry import Backoff
from producer_workers.follow_owner import OWNER
from rolloutmq.launch import log_writer
from rolloutmq.process_ends import BY_OTHERS, ProcessFailed, ProcessJournal

# exit codes after which a restart would fail in the same way
HOPELESS = frozenset({ConfigError.exit_code, RunError.exit_code})

# pause before a process that ended by itself is restarted
RESTART_DELAY_S = 5.0
BACKOFF = Backoff(0.5, 10.0, jitter=0.0)  # pauses before a process that died is started again

FRUITLESS = 3  # fruitless lives in a row that end with an error, and then no further one
STOPPED = 8  # the same for processes that a signal or a person may have ended

FEW = 6  # lines of a log that are shown where it has no error


class Child:
    """A `rolloutmq` command as a process in its own session, so that Ctrl-C does not reach it.

    With `ranks`, as many processes under torch.distributed that end and restart together; the exit
    code is that of the rank that caused the end. Rank r logs to NAME-r.log.
    """

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        log: Path,
        env: dict[str, str],
        journal: ProcessJournal,
        *,
        restarts: int,
        log_bytes: int = 1 << 26,
        ranks: int = 1,
        mark: Callable[[Child], object] = lambda _: None,
        may_idle: bool = True,
    ) -> None:
        """`mark`: returns what tells a fruitful life from the one before; None: nothing."""
        self.name = name
        self._mark = mark
        # a life of a process that may idle; it is not fruitless
        self._long_s = 3600.0 if may_idle else math.inf
        self._before: object = None
        self._fruitless = 0
        self._args = list(args)
        numbered = [log.with_stem(f"{log.stem}-{rank}") for rank in range(1, ranks)]
        self._logs = [log, *numbered]
        self._log_bytes = log_bytes
        self._env = env
        self._journal = journal
        self._restarts_left = restarts
        self._processes: list[subprocess.Popen[bytes]] = []
        self._writers: list[subprocess.Popen[bytes]] = []
        self._killed: set[int] = set()  # ranks that were killed because another one had ended
        self._started = self._retry_at = self._first_end = 0.0

    def start(self, *more: str) -> None:
        env = os.environ | self._env | {OWNER: str(os.getpid())}
        command = [sys.executable, "-m", "rolloutmq", *self._args, *more]
        self._before = self._mark(self) or self._before
        self._processes, self._writers = [], []
        self._killed = set()
        self._first_end = 0.0
        for log, variables in zip(self._logs, rank_environments(len(self._logs)), strict=True):
            writer = subprocess.Popen(
                [sys.executable, "-IS", log_writer.__file__, str(log), str(self._log_bytes)],
                stdin=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            assert writer.stdin
            with writer.stdin as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    env=env | variables, start_new_session=True,
                )  # fmt: skip
            self._journal.started(self.name, len(self._processes), process.pid)
            self._processes.append(process)
            self._writers.append(writer)
        self._started = time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def pid(self) -> int | None:
        return next(iter(self.pids), None)

    @property
    def pids(self) -> list[int]:
        """The processes that run, one for each rank."""
        return [process.pid for process in self._running]

    @property
    def exit_code(self) -> int | None:
        if not self._processes or self._running:
            return None
        return self._processes[self._cause].returncode

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    @property
    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]

    @property
    def _cause(self) -> int:
        """Return the rank that caused the end: rank 0, unless it only lost another one."""
        codes = [process.returncode for process in self._processes]
        if 0 not in self._killed and codes[0] not in (1, RankLost.exit_code):
            return 0
        own = [
            rank
            for rank, code in enumerate(codes)
            if code not in (0, RankLost.exit_code) and rank not in self._killed
        ]
        # an error of torch (1) may be that of a rank whose peer ended
        return min(own, key=lambda rank: (codes[rank] == 1, rank), default=0)

    def keep_alive(self, *more: str, is_over: bool = False) -> str | None:
        """Restart an ended process; return a report. Raises ProcessFailed if that is hopeless.

        One that succeeded is not restarted if the run `is_over`: it has seen the end of the run.
        """
        now = time.monotonic()
        if len(self._running) not in (0, len(self._processes)):
            self._first_end = self._first_end or now
            if now - self._first_end >= 10.0:  # ranks may wait for another one forever
                for rank, process in enumerate(self._processes):
                    if process.poll() is None:
                        self._killed.add(rank)
                        process.kill()
        code = self.exit_code
        if code is None or (code == 0 and is_over):
            return None
        if self._retry_at == 0.0:
            return self._note_end(code)
        if now < self._retry_at:
            return None
        self._retry_at = 0.0
        self.start(*more)
        return f"{self.name} restarted"

    def _note_end(self, code: int) -> str | None:
        """Count the life that ended, and decide when the next one begins. Raises ProcessFailed."""
        mark = self._mark(self)
        is_fruitful = mark not in (None, self._before) or self.age_s > self._long_s
        self._fruitless = 0 if is_fruitful else self._fruitless + 1
        is_death = code not in (0, INTERRUPTED)
        self._restarts_left -= is_death
        cause, *more = self.last_error().splitlines() or [""]
        end = self._journal.end_of(self.name, self._cause, self._processes[self._cause].pid, code)
        end.lived_s, end.fruitless, end.cause = self.age_s, self._fruitless, cause[:200]
        is_from_outside = -code in BY_OTHERS
        is_fault = is_death and (not is_from_outside or end.kind == "process/out_of_memory")
        is_loop = self._fruitless >= (FRUITLESS if is_fault else STOPPED)
        end.is_final = code in HOPELESS or self._restarts_left < 0 or is_loop
        self._journal.ended(end)
        if end.is_final:
            how = f"{self._who} {end.how}"
            how += f", {self._fruitless} times without progress" if is_loop else ""
            if is_from_outside:
                lines = [f"{how}: {end.why}"]
            else:
                lines = [*dict.fromkeys((self._journal.full_disk(end), end.why, cause)), how, *more]
            error = "\n  ".join(filter(None, lines))
            raise ProcessFailed(error, end, hint=f"its log: {self._log}")
        if not is_death:  # it saw the end of a run that was continued since, or was stopped by hand
            self._retry_at = time.monotonic() + RESTART_DELAY_S
            return None
        self._retry_at = time.monotonic() + BACKOFF.pause_s(self._fruitless)
        return f"{self._who} {end.how}: {end.why}; its log: {self._log}"

    @property
    def _log(self) -> Path:
        return self._logs[self._cause if self._processes and not self._running else 0]

    @property
    def _who(self) -> str:
        return self.name if len(self._logs) == 1 else f"{self.name} rank {self._cause}"

    def last_error(self) -> str:
        """Return the newest error of its log with its hint, or else the last lines."""
        if not self._running:
            self._drain()
        tail: deque[bytes] = deque(maxlen=40)
        for file in (self._log.with_name(self._log.name + ".1"), self._log):
            if file.exists():
                with file.open("rb") as log:
                    tail.extend(log)
        text = b"".join(tail).decode(errors="replace").rstrip()
        lines = text.splitlines() or ["(no output)"]
        starts = [n for n, line in enumerate(lines) if line.startswith("error: ")]
        if not starts:
            return "\n".join([lines[-1], *lines[-FEW:-1]])
        rest = takewhile(lambda line: line.startswith(("  ", "hint: ")), lines[starts[-1] + 1 :])
        return "\n".join([lines[starts[-1]].removeprefix("error: "), *rest])

    def terminate(self) -> None:
        for process in self._running:
            process.terminate()

    def kill(self) -> bool:
        """Kill the process, whose children notice by themselves; return whether it was running."""
        running = self._running
        for process in running:
            process.kill()
        return bool(running)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it came in time."""
        end = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        self._drain()
        return True

    def _drain(self) -> None:
        """Wait until the logs have what was printed, unless children of the process print on."""
        end = time.monotonic() + 1.0
        for writer in self._writers:
            with suppress(subprocess.TimeoutExpired):
                writer.wait(max(0.0, end - time.monotonic()))


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """Return the variables by which ranks on this machine find each other, as torchrun does.

    If another process takes the port before rank 0 does, all ranks end and restart with a new one.
    """
    if ranks == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
