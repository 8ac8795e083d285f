"""Traces of a group's life across processes, by OpenTelemetry (`pip install 'rolloutmq[otel]'`).

    enqueue ─ wait ─ claim ─ generate ┬ judge, for each rollout ─ submit or release ─ take ─ train ─ commit
    producer         worker           └                                               trainer

OTEL_TRACES_EXPORTER switches them on (`otlp`, or `console` for JSON lines on stderr); the other
variables of OpenTelemetry hold as everywhere. Where it is not set, nothing of this file is made or
asked: a run's parts are replaced by ones that trace (`traced_run.py`), or are not.

The trace of a group, by name: every process computes it, so nothing has to travel with the group.
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


TRACE_BYTES = 16
SPAN_BYTES = 8
"""What OpenTelemetry and W3C trace context want."""


def trace_id(run_nonce: str, gid: str) -> str:
    """Hexadecimal, as trace viewers show it."""
    return blake2b(f"{run_nonce}/{gid}".encode(), digest_size=TRACE_BYTES).hexdigest()


def root_span_id(run_nonce: str, gid: str) -> str:
    """Of the span that the group's other spans belong to: `enqueue`."""
    return blake2b(
        f"{run_nonce}/{gid}".encode(), digest_size=SPAN_BYTES, person=b"root"
    ).hexdigest()


log = logging.getLogger("rolloutmq.tracing")

SWITCH = "OTEL_TRACES_EXPORTER"
Value = str | int


class Tracer:
    """What one process tells of groups. `root` is for who starts a group; all other spans belong to
    that one.
    """

    def __init__(
        self, provider: TracerProvider, run_nonce: str, root: ContextVar[SpanContext | None]
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("rolloutmq")
        self._nonce = run_nonce
        self._root = root

    def root(self, name: str, gid: str, start_ns: int, **attributes: Value) -> None:
        """The first span of a group, which ends now."""
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
        """A span that has ended: now, if not at `end_ns` (both in ns since 1970)."""
        context = self._context(gid)
        self._tracer.start_span(
            name, context, attributes={"gid": gid, **attributes}, start_time=start_ns
        ).end(end_ns)

    @contextmanager
    def during(self, name: str, gid: str, **attributes: Value) -> Iterator[None]:
        """A span of the block; `child` makes parts of it. An error in the block is noted, and goes
        on.
        """
        context = self._context(gid)
        with self._tracer.start_as_current_span(
            name, context, attributes={"gid": gid, **attributes}
        ):
            yield

    @contextmanager
    def child(self, name: str) -> Iterator[None]:
        """A part of the span around it."""
        with self._tracer.start_as_current_span(name):
            yield

    def flush(self) -> None:
        """Send what is there; it is done every few seconds, too, and when the process ends."""
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
    """As spans have it: since 1970, by this machine's clock."""
    return time.time_ns()


def open_tracer(run: str, run_nonce: str, process: str) -> Tracer | None:
    """The tracer of this process, where SWITCH asks for one. What cannot be had is said and left
    out: no run shall end for its traces.
    """
    wanted = os.environ.get(SWITCH, "none")
    if wanted in ("", "none"):
        return None
    try:
        exporter = _exporter(wanted)
    except ImportError as error:
        log.warning(
            "%s is %s, but there are no traces: %s (pip install 'rolloutmq[otel]')",
            SWITCH,
            wanted,
            error,
        )
        return None
    if exporter is None:
        log.warning(
            "%s is %r, but there are no traces: it is otlp, console or none", SWITCH, wanted
        )
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
    """A tracer whose spans go to `exporter` in the background, and at the end of this process."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    root: ContextVar[SpanContext | None] = ContextVar("root", default=None)

    class Ids(RandomIdGenerator):
        """Random ones, but for the first span of a group."""

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
