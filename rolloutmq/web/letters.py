"""Group dead letters by their cause, for the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from buffer.groups.dead_letters import DeadLetter

SHOWN_LETTERS = 50  # letters of one cause that are listed


def letters_by_cause(letters: Sequence[DeadLetter], total: int) -> dict[str, Any]:
    """Return the causes of `letters`, the most frequent first; `total`: with those not read."""
    causes: defaultdict[str, list[DeadLetter]] = defaultdict(list)
    for letter in letters:
        causes[letter.cause].append(letter)
    groups = sorted(causes.items(), key=lambda pair: -len(pair[1]))
    described = [_described(cause, found) for cause, found in groups]
    return {"total": total, "read": len(letters), "causes": described}


def _described(cause: str, letters: list[DeadLetter]) -> dict[str, Any]:
    return {
        "cause": cause,
        "count": len(letters),
        "tasks": sorted({letter.task for letter in letters}),
        "workers": sorted({letter.worker for letter in letters if letter.worker}),
        "newest_ms": min(letter.age_ms for letter in letters),
        "letters": [asdict(letter) for letter in letters[:SHOWN_LETTERS]],
    }
