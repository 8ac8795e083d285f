"""Traces of a group's life across processes, by OpenTelemetry (`pip install '.[otel]'`).

    enqueue ─ wait ─ claim ─ generate ┬ judge (each) ─ submit or release ─ take ─ train ─ commit
    producer         worker           └                                     trainer

OTEL_TRACES_EXPORTER switches them on (`otlp`, or `console` for JSON lines on stderr); the other
variables of OpenTelemetry have their usual meaning. Without it, no tracer is made, and the parts
of a run are not replaced by those of `traced_run.py`.

Every process computes the ids of a group's trace from its gid, so no context travels with the
group.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext


log = logging.getLogger("rolloutmq.tracing")

SWITCH = "OTEL_TRACES_EXPORTER"
Value = str | int

TRACE_BYTES = 16
SPAN_BYTES = 8
"""Lengths of ids in OpenTelemetry and W3C Trace Context."""


def trace_id(run_nonce: str, gid: str) -> str:
    """Return the id of a group's trace in hexadecimal, as trace viewers show it."""
    return blake2b(f"{run_nonce}/{gid}".encode(), digest_size=TRACE_BYTES).hexdigest()


def root_span_id(run_nonce: str, gid: str) -> str:
    """Return the id of `enqueue`, the span to which the group's other spans belong."""
    return blake2b(
        f"{run_nonce}/{gid}".encode(), digest_size=SPAN_BYTES, person=b"root"
    ).hexdigest()


class Tracer:
    """Records what one process does with groups.

    Usage:
        with tracer.during("submit", gid, worker="w0"):
            submit()

    The process that starts a group records its `root`; all other spans belong to that one.
    """

    def __init__(
        self, provider: TracerProvider, run_nonce: str, root: ContextVar[SpanContext | None]
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("rolloutmq")
        self._nonce = run_nonce
        self._root = root

    def root(self, name: str, gid: str, start_ns: int, **attributes: Value) -> None:
        """Record the first span of a group, which ends now."""
        from opentelemetry.context import Context

        forced = self._root.set(self._of(gid))
        try:
            self._tracer.start_span(
                name, Context(), attributes={"gid": gid, **attributes}, start_time=start_ns
            ).end()
        finally:
            self._root.reset(forced)

    def past(
        self, name: str, gid: str, start_ns: int, end_ns: int | None = None, **attributes: Value
    ) -> None:
        """Record a span that ends at `end_ns`, by default now (both in ns since 1970)."""
        context = self._context(gid)
        self._tracer.start_span(
            name, context, attributes={"gid": gid, **attributes}, start_time=start_ns
        ).end(end_ns)

    @contextmanager
    def during(self, name: str, gid: str, **attributes: Value) -> Iterator[None]:
        """Record the block as a span; `child` makes parts of it.

        An error in the block is recorded and raised.
        """
        context = self._context(gid)
        with self._tracer.start_as_current_span(
            name, context, attributes={"gid": gid, **attributes}
        ):
            yield

    @contextmanager
    def child(self, name: str) -> Iterator[None]:
        """Record the block as a part of the surrounding span."""
        with self._tracer.start_as_current_span(name):
            yield

    def flush(self) -> None:
        """Send all recorded spans; this also happens every few seconds and at the process's end."""
        self._provider.force_flush()

    def _of(self, gid: str) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        trace = int(trace_id(self._nonce, gid), 16)
        span = int(root_span_id(self._nonce, gid), 16)
        return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def _context(self, gid: str) -> Context:
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        return set_span_in_context(NonRecordingSpan(self._of(gid)), Context())


def now_ns() -> int:
    """Return the time as spans have it: ns since 1970 by this machine's clock."""
    return time.time_ns()


def open_tracer(run: str, run_nonce: str, process: str) -> Tracer | None:
    """Return the tracer of this process; None if SWITCH asks for none.

    An exporter that is unknown or not installed is logged and ignored: a run must not fail for its
    traces.
    """
    wanted = os.environ.get(SWITCH, "none")
    if wanted in ("", "none"):
        return None
    try:
        exporter = _exporter(wanted)
    except ImportError as error:
        log.warning(
            "no traces: %s=%s needs a package: %s (pip install '.[otel]')",
            SWITCH,
            wanted,
            error,
        )
        return None
    if exporter is None:
        log.warning("no traces: %s is %r; use otlp, console or none", SWITCH, wanted)
        return None
    return tracer_of(exporter, run, run_nonce, process)


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


def tracer_of(exporter: SpanExporter, run: str, run_nonce: str, process: str) -> Tracer:
    """Return a tracer that sends spans to `exporter` in the background and at the process's end."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    root: ContextVar[SpanContext | None] = ContextVar("root", default=None)

    class Ids(RandomIdGenerator):
        """Random ids, except for the first span of a group."""

        def generate_trace_id(self) -> int:
            forced = root.get()
            return forced.trace_id if forced else super().generate_trace_id()

        def generate_span_id(self) -> int:
            forced = root.get()
            return forced.span_id if forced else super().generate_span_id()

    names = {"service.name": "rolloutmq", "service.instance.id": process, "rolloutmq.run": run}
    provider = TracerProvider(resource=Resource.create(names), id_generator=Ids())
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider, run_nonce, root)
