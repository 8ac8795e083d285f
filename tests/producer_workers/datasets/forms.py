"""Functions of a user that make problems of records: processes import them without torch."""

from __future__ import annotations

from typing import Any

from producer_workers.datasets.dataset import Problem


def from_other_form(row: dict[str, Any]) -> dict[str, Any]:
    return {"question": row["problem"], "answer": row["solution"]}


def to_problem(row: Any) -> Problem:
    return Problem(
        messages=[{"role": "user", "content": row["question"]}], ground_truth=row["answer"]
    )
