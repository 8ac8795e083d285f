"""A run in a folder, as a user has it: a config, a server, and processes that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import orjson
import psutil
import redis

from buffer.ledger.account import FsckReport
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from consumer.handle.step_log import StepLog
from tests.pipeline.held_run import Hold
from tests.waits import DEADLINE_S, end_of, until
from tests.warm_process import start_command

ROOT = Path(__file__).parents[2]
BATCH = 4

CONFIG = Path(__file__).with_name("site.toml").read_text(encoding="utf-8")


@dataclass
class Process:
    """A `rolloutmq` command that runs; `said()` is its output so far."""

    started: subprocess.Popen[bytes] | BaseProcess
    log: Path
    is_awaited: bool = False
    """its end is no surprise"""

    @property
    def pid(self) -> int:
        assert self.started.pid
        return self.started.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        if isinstance(self.started, BaseProcess):
            return self.started.exitcode
        return self.started.poll()

    def children(self) -> list[psutil.Process]:
        """Return the processes that a launcher has started."""
        found: list[psutil.Process] = psutil.Process(self.pid).children()
        return found

    def child(self, name: str) -> psutil.Process:
        """Return the only child of this name, which is its command."""
        (found,) = [each for each in self.children() if each.name() == name]
        return found

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def end(self, number: signal.Signals) -> int:
        if self.exit_code is None:
            os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        self.is_awaited = True
        if isinstance(self.started, BaseProcess):
            self.started.join(DEADLINE_S)
        else:
            self.started.wait(DEADLINE_S)
        assert self.exit_code is not None, self.said()
        return self.exit_code


HELD = """
agent_loop = "tests.pipeline.held_run:HeldLoop"
agent_loop_options = {{ hold = "{}" }}
"""


@dataclass
class Site:
    """Everything of one run below `folder`. `close` ends what is left of it.

    `held`: the step behind which the run waits until `let` or `let_go`; None: it goes on by itself.
    """

    folder: Path
    model: Path
    name: str = "site"
    steps: int = 12
    token_s: float = 0.0
    held: int | None = None
    processes: list[Process] = field(default_factory=list)
    url: str = ""
    """REDIS_URL of the processes that are started next; "" for the run's own server"""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [{"question": f"{n} + {n} =", "answer": str(2 * n)} for n in range(40)]
        (self.folder / "problems.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
        facts = {k: getattr(self, k) for k in ("name", "folder", "steps", "model", "token_s")}
        # held groups keep their slots, and end at once when their worker leaves
        loop, concurrency, drain_timeout_s = "", 3, 5.0
        if self.held is not None:
            loop, concurrency, drain_timeout_s = HELD.format(self.hold.file), 64, 0.2
            self.hold.allow(BATCH * self.held)
        text = CONFIG.format(
            **facts, batch=BATCH, loop=loop, concurrency=concurrency,
            drain_timeout_s=drain_timeout_s,
        )  # fmt: skip
        self.config.write_text(text, encoding="utf-8")

    @property
    def config(self) -> Path:
        return self.folder / "run.toml"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def hold(self) -> Hold:
        return Hold(self.folder / "hold")

    @property
    def server(self) -> EmbeddedServer:
        return EmbeddedServer(self.run_dir / "server")

    # -- processes -----------------------------------------------------------

    def start(self, verb: str, *more: str) -> Process:
        """`rolloutmq VERB CONFIG …` as a process that is forked from a warm one."""
        return self.start_words(verb, str(self.config), *more)

    def start_words(self, *words: str) -> Process:
        """`rolloutmq WORD …` as a process that is forked from a warm one."""
        log = self._new_log(words[0])
        self.processes.append(Process(start_command(log, list(words), self._environment()), log))
        return self.processes[-1]

    def start_module(self, *words: str) -> Process:
        """`python -m WORD …` as a process."""
        log = self._new_log(words[0])
        with log.open("wb") as out:
            popen = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=ROOT, env=self._environment(),
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
        self.processes.append(Process(popen, log))
        return self.processes[-1]

    def _new_log(self, name: str) -> Path:
        return self.folder / f"{name}-{len(self.processes)}.log"

    def _environment(self) -> dict[str, str]:
        """Return the environment of a process: of this one, without what concerns other runs."""
        env = {k: v for k, v in os.environ.items() if k not in ("REDIS_URL", "ROLLOUTMQ_OWNER_PID")}
        if self.url:
            env["REDIS_URL"] = self.url
        return env | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def command(self, verb: str, *more: str) -> tuple[int, str]:
        """Run a command that should end by itself; return exit code and output."""
        process = self.start(verb, *more)
        return process.wait(), process.said()

    def kill_server(self) -> None:
        """Kill the server as soon as it answers; a launcher may start it again at once."""

        def answered() -> int:
            with suppress(redis.RedisError), self.server.connect() as client:
                return int(client.info("server")["process_id"])
            return 0

        os.kill(until(answered, "an answer of the server"), signal.SIGKILL)

    def close(self) -> None:
        for process in self.processes:
            if process.exit_code is None:
                process.end(signal.SIGKILL)
        self.server.kill()

    # -- sights --------------------------------------------------------------

    def history(self) -> StepLog:
        log = StepLog(self.run_dir / "steps.jsonl")
        log.read_new()
        return log

    def lines(self) -> list[tuple[int, tuple[str, ...]]]:
        """(step, gids) of every line that any trainer wrote, replaced ones too."""
        file = self.run_dir / "steps.jsonl"
        written = file.read_bytes() if file.exists() else b""
        # a line without its end is still being written
        rows = [orjson.loads(line) for line in written.splitlines(True) if line.endswith(b"\n")]
        return [(row["step"], tuple(row["gids"])) for row in rows]

    def reached(self) -> int:
        """Return the newest step that a trainer wrote down."""
        return max((step for step, _ in self.lines()), default=0)

    # -- waiting -------------------------------------------------------------

    def let(self, steps: int) -> int:
        """Let a held run make some more steps; return the last of them."""
        assert self.held is not None, "this run goes on by itself"
        self.held += steps
        self.hold.allow(BATCH * self.held)
        return self.held

    def let_go(self) -> None:
        self.held = None
        self.hold.allow(1 << 40)

    def until_held(self) -> None:
        assert self.held is not None, "this run goes on by itself"
        self.until(lambda: self.reached() >= (self.held or 0), f"step {self.held}")

    def reach(self, steps: int) -> int:
        """Let a held run make some more steps, wait for them, and return the last."""
        step = self.let(steps)
        self.until_held()
        return step

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something is so. Fail when a process ends for whose end no test waits."""

        def over() -> str:
            watched = [process for process in self.processes if not process.is_awaited]
            return "; ".join(filter(None, (end_of(process.started) for process in watched)))

        until(condition, what, over, self.words)

    def words(self) -> str:
        """Return the ends of all logs, for a test that failed."""
        logs = [*(p.log for p in self.processes), *(self.run_dir / "logs").glob("*.log")]
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs
        )

    def audit(self) -> FsckReport:
        with_server = self.server
        mine = not with_server.is_running
        with_server.start()
        try:
            store = Store(with_server.url, deadline_s=400.0)
            run = Run.open(store, self.name)
            run.janitor.sweep()
            audit = run.account.fsck()
            store.close()
        finally:
            if mine:
                with_server.stop()
        return audit

    def trained(self) -> list[RolloutGroup]:
        with self.server, closing(Store(self.server.url)) as store:
            run = Run.open(store, self.name)
            manifests = [run.ledger.manifest(step) for step in range(1, self.steps + 1)]
            return [
                run.buffer.read(entry.payload)
                for manifest in manifests
                if manifest
                for entry in manifest.entries
            ]

    def check(self, *, is_regenerated: bool = False) -> None:
        """Check that nothing was lost or trained twice, and that every step is there.

        A batch that was delivered again must be the same, unless the run was made again: then the
        steps behind its checkpoint have other groups.
        """
        history = self.history()
        assert [step.step for step in history.steps] == list(range(1, self.steps + 1)), self.words()
        assert not history.trained_twice()
        batches: dict[int, tuple[str, ...]] = {}
        for step, gids in self.lines():
            assert is_regenerated or batches.setdefault(step, gids) == gids, (
                f"step {step} was delivered with other groups"
            )
        audit = self.audit()
        assert audit.clean, (audit.faults, audit.lost, audit.doubled)
        assert audit.checked >= BATCH * self.steps
