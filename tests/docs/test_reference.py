"""The reference pages that the site makes from the code."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from buffer.redis.keys import SLOTS
from docs.reference import REFERENCES
from docs.reference.commands import command_reference
from docs.reference.keys import key_reference
from docs.reference.metrics import metric_reference
from rolloutmq.cli import app
from rolloutmq.views.run_metrics import FAMILIES


@pytest.mark.parametrize("name", ["command", "config", "metric"])
def test_every_row_has_a_meaning(name: str) -> None:
    page = REFERENCES[f"docs/pages/{name}_reference.md"]()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if row.endswith("|  |")] == []


def test_commands_are_in_the_order_of_help() -> None:
    printed = CliRunner().invoke(app, ["--help"]).stdout
    listed = re.findall(r"^  ([a-z]\S*)  ", printed.partition("Examples:")[0], re.MULTILINE)
    described = re.findall(r"^## `rolloutmq (\S+)`$", command_reference(), re.MULTILINE)
    assert described == listed


def test_every_key_that_scripts_name_is_on_the_page() -> None:
    page = key_reference()
    assert [name for name in SLOTS if not re.search(rf"`{name}\*?`", page)] == []


def test_labels_of_metrics_are_those_that_are_declared() -> None:
    page = metric_reference()
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in ("run", *family.labels))
        row = rf"^\| `rolloutmq_{family.name}(_total)?` \| \w+ \| {labels} \| "
        assert re.search(row, page, re.MULTILINE), family.name
