from __future__ import annotations

import re

import pytest

from buffer.redis.keys import SLOTS
from docs.reference import REFERENCES
from docs.reference.keys import key_reference


@pytest.mark.parametrize("name", ["command", "config", "metric"])
def test_every_row_has_a_meaning(name: str) -> None:
    page = REFERENCES[f"docs/pages/{name}_reference.md"]()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_key_that_scripts_name_is_on_the_page() -> None:
    page = key_reference()
    assert [name for name in SLOTS if not re.search(rf"`{name}\*?`", page)] == []
