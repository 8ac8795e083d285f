"""Dead letters by their cause, for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from buffer.failure_text import message_of, trace_of
from buffer.groups.dead_letters import DeadLetter, by_cause

SHOWN_LETTERS = 50  # letters of one cause that are listed


def letters_by_cause(letters: Sequence[DeadLetter], total: int) -> dict[str, Any]:
    """Return the causes of `letters`; `total`: with those that were not read."""
    causes = [_described(cause, found) for cause, found in by_cause(letters)]
    return {"total": total, "read": len(letters), "causes": causes}


def _described(cause: str, letters: list[DeadLetter]) -> dict[str, Any]:
    shown = letters[:SHOWN_LETTERS]
    return {
        "cause": cause,
        "count": len(letters),
        "tasks": sorted({letter.task for letter in letters}),
        "workers": sorted({letter.worker for letter in letters if letter.worker}),
        "newest_ms": min(letter.age_ms for letter in letters),
        "trace": trace_of(letters[0].reason),
        "letters": [asdict(each) | {"reason": message_of(each.reason)} for each in shown],
    }
