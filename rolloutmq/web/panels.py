"""Panels of the run's view that read data of their own: GET /api/panels/NAME.

A panel is a function here and a row of PANELS, and a file with a row in `static/run/panels.js`. It
returns JSON, or None where it has nothing to show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buffer.run.run import Run
from consumer.handle.step_log import TrainedStep
from rolloutmq.process_ends import ProcessEnd, read_processes
from rolloutmq.views.explain.who_waited import read_waits
from rolloutmq.views.hosts import hosts
from rolloutmq.views.run_view import read_run_view


@dataclass(frozen=True)
class Source:
    """What a panel may read. `run` is None for a report, and where the server is lost."""

    folder: Path | None
    run: Run | None = None
    steps: Sequence[TrainedStep] = field(default_factory=list)


def waits(source: Source) -> Any:
    """Return who waited for whom in the last steps: a lane for the trainer and each worker."""
    if source.run is None:
        return None
    found = read_waits(source.run, read_run_view(source.run), source.steps)
    return found.document() if found else None


def run_hosts(source: Source) -> Any:
    """Return the hosts of the run, with what is in use of each."""
    return hosts(source.run.fleet.workers() if source.run else (), source.steps)


def processes(source: Source) -> Any:
    """Return the processes that `rolloutmq run` started: how often, and how each ended last."""
    found: dict[str, dict[str, Any]] = {}
    for line in read_processes(source.folder) if source.folder else ():
        name = f"{line.name} rank {line.rank}" if line.rank else line.name
        own = found.setdefault(name, {"process": name, "starts": 0, "started_s": 0.0})
        if isinstance(line, ProcessEnd):
            own |= {"ended_s": line.at_s, "end": f"{line.how}: {line.why}"}
        else:
            own |= {"starts": own["starts"] + 1, "started_s": line.at_s}
    return [*found.values()]


PANELS: Mapping[str, Callable[[Source], Any]] = {
    "waits": waits,
    "hosts": run_hosts,
    "processes": processes,
}


def read_panels(source: Source) -> dict[str, Any]:
    return {name: read(source) for name, read in PANELS.items()}
