"""Read rows of NeMo Gym: JSON lines with `responses_create_params` and what their verifier needs.

The agent gets the whole row, in the problem's `extra["row"]`; the messages are for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from producer_workers.config.dataset import NemoGymSection
from producer_workers.datasets.dataset import Dataset, Problem
from producer_workers.datasets.files import JsonlDataset
from producer_workers.datasets.records import problem_of


def open_rows(section: NemoGymSection, *_: Any) -> Dataset:
    return JsonlDataset(section.path, _problem)


def _problem(row: Any) -> Problem:
    """Return a row as a problem. Raises ValueError."""
    asked = row.get("responses_create_params") if isinstance(row, Mapping) else None
    if not isinstance(asked, Mapping) or "input" not in asked:
        raise ValueError("there are no responses_create_params with an input")
    return problem_of({"messages": [*_messages(asked)], "extra": {"row": row}})


def _messages(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if asked.get("instructions"):
        yield {"role": "system", "content": asked["instructions"]}
    given = asked["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        if "role" in item and "content" in item:
            yield {"role": item["role"], "content": _text(item["content"])}


def _text(content: Any) -> str:
    return (
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    )
