"""The trace of a group, by name: every process computes it, so nothing has to travel with the group."""

from __future__ import annotations

from hashlib import blake2b

TRACE_BYTES, SPAN_BYTES = 16, 8
"""What OpenTelemetry and W3C trace context want."""


def trace_id(run_nonce: str, gid: str) -> str:
    """Hexadecimal, as trace viewers show it."""
    return blake2b(f"{run_nonce}/{gid}".encode(), digest_size=TRACE_BYTES).hexdigest()


def root_span_id(run_nonce: str, gid: str) -> str:
    """Of the span that the group's other spans belong to: `enqueue`."""
    return blake2b(f"{run_nonce}/{gid}".encode(), digest_size=SPAN_BYTES, person=b"root").hexdigest()
