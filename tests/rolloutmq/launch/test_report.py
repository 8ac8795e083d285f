from __future__ import annotations

import pytest
from rich.console import Console

from rolloutmq.views.run_folder import accuracy_table


def cells(first: dict[str, float], last: dict[str, float]) -> dict[str, str]:
    table = accuracy_table({("quiz", 0): first, ("quiz", 8): last})
    console = Console(width=200)
    rows = [[str(cell) for cell in column.cells] for column in table.columns]
    assert console.measure(table).maximum > 0
    return {str(column.header): row[0] for column, row in zip(table.columns, rows, strict=True)}


@pytest.mark.parametrize(
    ("temperature", "oldest", "shown"),
    [(0.0, 8.0, ("8", "0, greedy")), (0.7, 5.0, ("5 to 8", "0.7"))],
)
def test_the_table_has_failures_weights_and_temperature_beside_the_accuracy(
    temperature: float, oldest: float, shown: tuple[str, str]
) -> None:
    row = cells(
        {"eval/accuracy": 0.25, "eval/groups": 12.0},
        {
            "eval/accuracy": 0.5, "eval/groups": 10.0, "eval/failed": 2.0,
            "eval/oldest_version": oldest, "eval/newest_version": 8.0,
            "eval/temperature": temperature,
        },
    )  # fmt: skip
    assert [row[name] for name in ("before", "after", "change")] == ["0.250", "0.500", "+0.250"]
    assert (row["problems"], row["failed"]) == ("12", "2")
    assert (row["weights"], row["temperature"]) == shown
