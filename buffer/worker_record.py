"""What a worker's record says, for people and programs: a worker may write anything into it."""

from __future__ import annotations

import re
from collections.abc import Mapping

WHOLE = (
    "concurrency", "ack", "done", "failed", "requests", "judged", "judging_ms", "judge_failures", "judge_p50_ms",
    "judge_p99_ms", "quarantined", "joined_ms", "seen_ms",
)  # fmt: skip
"""Fields that are whole numbers."""

TOLD = ("id", "silent_ms", "holds", "bad_groups", "barred_for_ms")
"""Fields that whoever reads the record adds: the worker's own word on them counts for nothing."""

_NUMBERS = dict.fromkeys(WHOLE, r"-?\d{1,15}") | {"tokens_per_s": r"\d{1,15}(\.\d{1,20})?(e[+-]?\d{1,2})?"}


def read_record(record: Mapping[bytes, bytes]) -> dict[str, str]:
    """The record as text; what should be a number and is none is as if it had not been written."""
    told = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in record.items()}
    return {name: value for name, value in told.items() if name not in TOLD and _is_sound(name, value)}


def _is_sound(name: str, value: str) -> bool:
    return name not in _NUMBERS or re.fullmatch(_NUMBERS[name], value, re.ASCII) is not None
