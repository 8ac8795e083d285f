"""Optional features that observe a run's processes, attached by entry points.

    [project.entry-points."rolloutmq.observers"]
    my_counter = "my_package.my_module:observe"

Each process calls `observe(run, process, config)` once, with the name "producer", "trainer" or its
own id, and its config. It may append a `buffer.observers.Observer` to `run.observers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from buffer.imports import attached, load_object
from buffer.run.run import Run
from rolloutmq.config.config import Config

OBSERVERS = "rolloutmq.observers"


@contextmanager
def observed(run: Run, process: str, config: Config) -> Iterator[None]:
    """Let all installed observers observe `process` during this block. Raises ConfigError."""
    before = len(run.observers)
    for spec in attached(OBSERVERS).values():
        load_object(spec, kind="observer")(run, process, config)
    with ExitStack() as stack:
        for observer in run.observers[before:]:
            stack.callback(observer.closed)
        yield
