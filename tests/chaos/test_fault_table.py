"""The table of faults names tests, faults and benchmarks that exist, and all 50 cases."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.chaos.failover_nemesis import FailoverNemesis
from tests.chaos.server_nemesis import ServerNemesis

TESTS = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (TESTS / "chaos" / "FAULTS.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d", line)
]


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_all_cases_are_there_and_each_is_tried() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 51))
    assert all(re.fullmatch(r"(`[^`]+` ?)+", row[3]) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_tries_a_case_exists(row: list[str]) -> None:
    for name in re.findall(r"`([^`]+)`", row[3]):
        if name.startswith("chaos:"):
            fault = f"_{name.removeprefix('chaos:')}"
            assert any(hasattr(kind, fault) for kind in (ServerNemesis, FailoverNemesis)), name
        elif name.startswith("bench:"):
            assert (TESTS.parent / "benchmarks" / name.removeprefix("bench:")).exists(), name
        else:
            file, _, test = name.partition("::")
            assert test in functions(TESTS / file), name
