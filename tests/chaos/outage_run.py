"""The server is away for long: everybody waits, says so once, and goes on by itself."""

from __future__ import annotations

import time

from tests.chaos.crew import until
from tests.chaos.harness import ChaosRun
from tests.chaos.plan import SERVER

MOST_LINES = 8
"""Of a process's log, for one outage: it is noticed in several places of a worker, each of which
says so once.
"""


class OutageRun(ChaosRun):
    """The server is killed, stays away for `outage_s`, and comes back as it was. No other fault."""

    outage_s = 30.0

    def _strike(self) -> None:
        self._work_for(self._plan.seconds / 2)
        processes = {name: member.popen for name, member in self.crew.members.items()}
        said = self._lines()
        self._say(f"the server is away for {self.outage_s:g} s")
        self.history.note("fault", kind="server away", target=SERVER, seconds=self.outage_s)
        self._server.kill()
        self._work_for(self.outage_s)
        self._server.start()
        self._set_fsync()
        back = time.time()
        self.history.note("back")
        if not until(lambda: self._tended(lambda: self._has_trained(since=back)), self._recover_s):
            self.crew.surprises.append("nothing was trained once the server was back")
        self._work_for(self._plan.seconds / 2)
        ended = [
            name
            for name, member in self.crew.members.items()
            if member.popen is not processes[name]
        ]
        self.crew.surprises += [f"{name} did not outlast the outage" for name in ended]
        self._count_lines(said)

    def _lines(self) -> dict[str, int]:
        """Warnings that each process has written to its log."""
        files = {
            file.stem: file.read_bytes().splitlines() for file in self.folders.logs.glob("*.log")
        }
        return {name: sum(_is_warning(line) for line in said) for name, said in files.items()}

    def _count_lines(self, before: dict[str, int]) -> None:
        said = {name: lines - before.get(name, 0) for name, lines in self._lines().items()}
        self._say(
            "lines in the logs: "
            + ", ".join(f"{name} {lines}" for name, lines in sorted(said.items()))
        )
        loud = [
            f"{name} wrote {lines} lines about one outage"
            for name, lines in said.items()
            if lines > MOST_LINES
        ]
        self.crew.surprises += loud


def _is_warning(line: bytes) -> bool:
    """Not of one group, which may fail for reasons of its own."""
    return b'"level":"info"' not in line and b'"gid"' not in line
