"""The client processes of a chaos run: started, signalled, and started again when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from producer_workers.follow_owner import OWNER
from proofs.chaos.faulty_link import Wiring
from proofs.chaos.history import History
from proofs.chaos.plan import FENCED, LOST, Folders
from proofs.chaos.replicated import Replicated
from proofs.chaos.stepped_server import SteppedServer

ROOT = Path(__file__).parents[2]
SETTLED_S = 2.0
RESTART_S = 0.5
"""A process that ends again and again must not take the machine."""


@dataclass
class Member:
    """One client: its name and role stay, its process comes and goes."""

    name: str
    role: str
    popen: subprocess.Popen[bytes] | None = None
    flags: tuple[str, ...] = ()
    killed: bool = False
    """it was told to end, or killed: whatever its exit code is, is expected"""
    started: float = 0.0
    exits: list[int] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def is_at_work(self, history: Path) -> bool:
        """Whether it has begun to work, a moment ago at least: who is struck before that is only
        never there.
        """
        if not self.is_up or time.monotonic() < self.started + SETTLED_S:
            return False
        assert self.popen is not None
        # a judge writes no history
        return self.role == "judge" or (history / f"{self.name}-{self.popen.pid}.jsonl").exists()

    def send(self, number: signal.Signals) -> bool:
        """Whether it was alive to be signalled."""
        if not self.is_up:
            return False
        assert self.popen is not None
        self.popen.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.killed = True
        return True


class Crew:
    """All clients of a run in `folders`. Each has a link of its own. `env`: what their environment
    has besides.
    """

    def __init__(
        self,
        folders: Folders,
        wiring: Wiring,
        servers: SteppedServer | Replicated,
        history: History,
        env: dict[str, str],
    ) -> None:
        self.folders = folders
        self._wiring = wiring
        self._servers = servers
        self._history = history
        self._env = env
        self.members: dict[str, Member] = {}
        self.replaced: list[subprocess.Popen[bytes]] = []
        self.surprises: list[str] = []
        """processes that ended by themselves, and why; a fenced one is none"""

    def add(self, name: str, role: str) -> None:
        self.members[name] = Member(name, role)
        self._start(self.members[name])

    def _start(self, member: Member) -> None:
        env = {k: v for k, v in os.environ.items() if k != "REDIS_URL"} | self._env
        env |= {OWNER: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        ports = self._wiring.link(member.name).ports
        env["CHAOS_JUDGE_URL"] = self._servers.judge_url_by(ports)
        who = (member.role, member.name, self._servers.url_by(ports), str(self.folders.root))
        words = ("-m", "proofs.chaos.client", *who, *member.flags)
        with (self.folders.logs / f"{member.name}.log").open("ab") as log:
            member.popen = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=env, stdout=log, stderr=log
            )
        member.started = time.monotonic()
        member.killed = False

    def replace(self, name: str) -> None:
        """A second process of the same name beside the first, which is left behind in `replaced`."""
        member = self.members[name]
        if member.popen is not None and member.is_up:
            self.replaced.append(member.popen)
        self._start(member)

    def are_at_work(self, target: str) -> bool:
        """Whether `target`, and all others but one, are: a run of which nobody is left shows
        nothing.
        """
        working = {
            name for name, member in self.members.items() if member.is_at_work(self.folders.history)
        }
        return target in working and len(working) >= len(self.members) - 1

    def tend(self) -> None:
        for member in self.members.values():
            if not member.is_up and time.monotonic() > member.started + RESTART_S:
                self._note_end(member)
                self._start(member)

    def _note_end(self, member: Member) -> None:
        assert member.popen is not None
        code = member.popen.returncode
        member.exits.append(code)
        pid = member.popen.pid
        self._history.note("exit", member=member.name, pid=pid, code=code, killed=member.killed)
        if not member.killed and code not in (0, FENCED, LOST):
            self.surprises.append(f"{member.name} ended with exit code {code}; see its log")

    def resume_all(self) -> None:
        """Wake whatever still sleeps."""
        for member in self.members.values():
            member.send(signal.SIGCONT)

    def wait_for_end(self, timeout_s: float) -> list[str]:
        """Wait until all have left by themselves; the names of those that did not."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and any(
            self._is_awaited(member) for member in self.members.values()
        ):
            time.sleep(0.05)
        return [member.name for member in self.members.values() if self._is_awaited(member)]

    def _is_awaited(self, member: Member) -> bool:
        # judges know no run: they serve a queue until they are told
        return member.is_up and member.role != "judge"

    def close(self) -> None:
        """End whatever is left."""
        processes = [
            member.popen for member in self.members.values() if member.popen
        ] + self.replaced
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
