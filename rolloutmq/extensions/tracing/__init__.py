"""Traces of a group's life across processes, by OpenTelemetry (`pip install '.[otel]'`).

    enqueue ─ wait ─ claim ─ rl.sample ┬ rl.reward ─ submit or release ─ take ─ rl.train ─ commit
    producer         worker            └ (each)                          trainer

OTEL_TRACES_EXPORTER switches them on (`otlp`, or `console` for JSON lines on stderr). Names
of spans follow OpenTelemetry's proposal for `rl.*` (semantic-conventions-genai 88). Every process
computes the ids of a trace from the gid, so no context travels with the group.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from hashlib import blake2b
from typing import TYPE_CHECKING

from buffer.ids import trace_id
from buffer.job import Job, ReleaseKind, Result
from buffer.manifest import Manifest
from buffer.observers import Observer
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext


log = logging.getLogger("rolloutmq.extensions.tracing")

SWITCH = "OTEL_TRACES_EXPORTER"


def root_span_id(run_nonce: str, gid: str) -> str:
    """Return the id of `enqueue`, the span to which the group's other spans belong."""
    return blake2b(f"{run_nonce}/{gid}".encode(), digest_size=8, person=b"root").hexdigest()


def trace_run(run: Run, process: str, config: object = None) -> Tracing | None:
    """Record what `process` does with `run`, if the environment asks for traces.

    An unknown or missing exporter is logged and ignored: a run must not fail for its traces.
    """
    wanted = os.environ.get(SWITCH, "none")
    if wanted in ("", "none"):
        return None
    try:
        exporter = _exporter(wanted)
    except ImportError as error:
        log.warning(
            "no traces: %s=%s needs a package: %s (pip install '.[otel]')", SWITCH, wanted, error
        )
        return None
    if exporter is None:
        log.warning("no traces: %s is %r; use otlp, console or none", SWITCH, wanted)
        return None
    tracing = Tracing(run, process, exporter)
    run.observers.append(tracing)
    return tracing


def _exporter(wanted: str) -> SpanExporter | None:
    if wanted == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if wanted == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(
            out=sys.stderr, formatter=lambda span: span.to_json(indent=None) + "\n"
        )
    return None


class Tracing(Observer):
    """Makes spans of the moments of one process.

    The process that starts a group records the first span, the parent of all others.
    """

    def __init__(self, run: Run, process: str, exporter: SpanExporter) -> None:
        self._run = run
        self._first: ContextVar[SpanContext | None] = ContextVar("first", default=None)
        self._provider = _provider(exporter, run, process, self._first)
        self._tracer = self._provider.get_tracer("rolloutmq")
        self._waiting_since: dict[str, int] = {}
        self._at_trainer: dict[int, tuple[int, Sequence[str]]] = {}

    def flush(self) -> None:
        """Send all recorded spans; this also happens every few seconds and at the process's end."""
        self._provider.force_flush()

    def _past(
        self, name: str, gid: str, start_ns: int, end_ns: int | None = None, **attributes: str | int
    ) -> None:
        """Record a span that ends at `end_ns`, by default now (both in ns since 1970)."""
        named = {"gid": gid, **attributes}
        context = self._context(gid)
        self._tracer.start_span(name, context, attributes=named, start_time=start_ns).end(end_ns)

    def _parent(self, gid: str) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        trace = int(trace_id(self._run.nonce, gid), 16)
        span = int(root_span_id(self._run.nonce, gid), 16)
        return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def _context(self, gid: str) -> Context:
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        return set_span_in_context(NonRecordingSpan(self._parent(gid)), Context())

    def enqueued(self, samples: Mapping[str, int], began_ns: int) -> None:
        from opentelemetry.context import Context

        for gid, count in samples.items():
            forced = self._first.set(self._parent(gid))
            named: dict[str, str | int] = {"gid": gid, "samples": count}
            try:
                self._tracer.start_span(
                    "enqueue", Context(), attributes=named, start_time=began_ns
                ).end()
            finally:
                self._first.reset(forced)

    def claiming(self, queues: Sequence[tuple[str, str]], limit: int) -> None:
        """Read since when the first groups of each queue wait: a stream id begins with its ms."""
        keys = self._run.keys
        heads = [
            ("XRANGE", keys.jobs(task, lane), "-", "+", "COUNT", limit) for task, lane in queues
        ]
        found = self._run.store.send("heads", heads)
        self._waiting_since = {
            fields[b"gid"].decode(): int(entry.partition(b"-")[0]) * 1_000_000
            for head in found
            for entry, fields in head
        }

    def claimed(
        self, worker: str, weights: PolicyVersion | None, jobs: Sequence[Job], began_ns: int
    ) -> None:
        for job in jobs:
            since = self._waiting_since.get(job.gid)
            if since is not None:  # else it arrived between the two calls
                self._past("wait", job.gid, min(since, began_ns), began_ns, lane=job.lane)
            self._past(
                "claim",
                job.gid,
                began_ns,
                worker=worker,
                tries=job.tries,
                weights=str(weights or ""),
            )

    def generating(
        self, gid: str, rollouts: int, engine: str, weights: PolicyVersion
    ) -> AbstractContextManager[object]:
        named: dict[str, str | int] = {"gid": gid, "rollouts": rollouts, "engine": engine}
        return self._tracer.start_as_current_span(
            "rl.sample", self._context(gid), attributes=named | {"weights": str(weights)}
        )

    def judging(self) -> AbstractContextManager[object]:
        return self._tracer.start_as_current_span("rl.reward")

    def submitted(
        self, worker: str, results: Sequence[Result], outcomes: Sequence[object], began_ns: int
    ) -> None:
        for result, outcome in zip(results, outcomes, strict=True):
            self._past(
                "submit",
                result.job.gid,
                began_ns,
                worker=worker,
                tokens=result.new_tokens,
                status=str(result.group.status),
                error=str(outcome) if isinstance(outcome, Exception) else "",
            )

    def released(
        self, worker: str, job: Job, kind: ReleaseKind, reason: str, began_ns: int
    ) -> None:
        self._past("release", job.gid, began_ns, worker=worker, kind=kind, reason=reason[:200])

    def taken(self, manifest: Manifest, began_ns: int) -> None:
        for gid in manifest.gids:
            self._past("take", gid, began_ns, step=manifest.step)
        self._at_trainer[manifest.step] = time.time_ns(), manifest.gids

    def committed(self, step: int, began_ns: int) -> None:
        for done in sorted(self._at_trainer.keys() & set(range(step + 1))):
            taken_ns, gids = self._at_trainer.pop(done)
            for gid in gids:
                self._past("rl.train", gid, taken_ns, began_ns, step=done)
                self._past("commit", gid, began_ns, step=done)


def _provider(
    exporter: SpanExporter, run: Run, process: str, first: ContextVar[SpanContext | None]
) -> TracerProvider:
    """Send spans in the background; a group's first span has the ids of `first`."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """Random ids, except for the first span of a group."""

        def generate_trace_id(self) -> int:
            forced = first.get()
            return forced.trace_id if forced else super().generate_trace_id()

        def generate_span_id(self) -> int:
            forced = first.get()
            return forced.span_id if forced else super().generate_span_id()

    names = {"service.name": "rolloutmq", "service.instance.id": process, "rolloutmq.run": run.name}
    names |= {"rl.system": "rolloutmq", "rl.run.id": run.nonce}
    provider = TracerProvider(resource=Resource.create(names), id_generator=Ids())
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
