"""What `rolloutmq run` prints at its end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from consumer.grpo.reporting.step_log import Evaluations
from rolloutmq.launch.report import accuracy_table


def _text(evaluations: Evaluations) -> str:
    screen = Console(file=io.StringIO(), width=100)
    screen.print(accuracy_table(evaluations))
    return screen.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("steps", "row"),
    [
        ([0, 60, 308], ["quiz", "0.250", "0.750", "308", "+0.500", "8"]),  # `set steps=308` of 80
        ([80], ["quiz", "-", "0.750", "80", "-", "8"]),  # a loop that evaluates only at the end
        ([0], ["quiz", "0.250", "0.250", "0", "+0.000", "8"]),
    ],
)
def test_accuracy_is_that_of_the_newest_step_that_was_evaluated(
    steps: list[int], row: list[str]
) -> None:
    evaluations = {
        ("quiz", step): {"eval/accuracy": 0.75 if step else 0.25, "eval/rollouts": 8.0}
        for step in steps
    }
    assert _text(evaluations).splitlines()[-1].replace("│", " ").split() == row
