"""Optional features that observe a run's processes, attached by entry points.

    [project.entry-points."rolloutmq.observers"]
    my_counter = "my_package.my_module:observe"

Each process calls `observe(run, process)` once, with the name "producer", "trainer" or its own id.
It may append a `buffer.observers.Observer` to `run.observers`.
"""

from __future__ import annotations

from buffer.imports import attached, load_object
from buffer.run.run import Run

OBSERVERS = "rolloutmq.observers"


def observe(run: Run, process: str) -> None:
    """Let all installed observers observe `process`. Raises ConfigError."""
    for spec in attached(OBSERVERS).values():
        load_object(spec, kind="observer")(run, process)
