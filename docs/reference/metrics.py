"""The page of all Prometheus metrics, from what the collectors return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import Metric

from buffer.redis.store import Store
from docs.reference.markdown import table
from rolloutmq.views.prometheus import RunCollector, process_registry

INTRODUCTION = """\
# Every metric

Names and units follow the conventions of Prometheus: seconds, bytes, ratios, `_total` for what only
grows. A histogram has the series `_bucket` (with the label `le`), `_sum` and `_count`.

## `rolloutmq metrics`

Whole runs: all of a server, or the one that `--run` names. A label `task` is the name of a training
or evaluation task, `worker` the name of a worker.
"""

PROCESS_INTRODUCTION = """\
## `rolloutmq worker`, `producer` and `train` with `--metrics`

One process, as it measures itself. On Linux, memory, processor time and open files are added, with
the names that all clients of Prometheus use (`process_resident_memory_bytes`, …).
"""

SUFFIXES = {"counter": "_total", "info": "_info"}
"""What the text format appends to the name of a family, by type."""


def metric_reference() -> str:
    """Return the page of the metrics of runs and of single processes."""
    store = Store("memory://")
    runs = RunCollector(store).collect()
    registry = process_registry("worker", store)
    for watch in store.watchers:
        watch("claim", 0.001, 1)  # a family shows its labels once it has a sample
    process = [family for family in registry.collect() if family.name.startswith("rolloutmq_")]
    return "\n".join([INTRODUCTION, _metrics(runs), PROCESS_INTRODUCTION, _metrics(process)])


def _metrics(families: Iterable[Metric]) -> str:
    rows = [
        (
            f"`{family.name}{SUFFIXES.get(family.type, '')}`",
            family.type,
            ", ".join(f"`{label}`" for label in _labels(family)),
            family.documentation,
        )
        for family in families
    ]
    return table(("metric", "type", "labels", "meaning"), rows)


def _labels(family: Metric) -> Sequence[str]:
    # prometheus_client has no public name for the labels of a family without samples
    declared: Sequence[str] = getattr(family, "_labelnames", ())
    in_samples = {label for sample in family.samples for label in sample.labels}
    return declared or sorted(in_samples - {"le"})
