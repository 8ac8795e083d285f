"""The reference pages of docs/pages are those that the code makes."""

from __future__ import annotations

import pytest

from docs.reference import PAGES, REFERENCES, config_reference


@pytest.mark.parametrize("name", REFERENCES)
def test_committed_page_is_up_to_date(name: str) -> None:
    committed = (PAGES / name).read_text(encoding="utf-8")
    assert committed == REFERENCES[name](), f"{name} is stale: run `make reference`"


def test_every_config_key_has_a_meaning() -> None:
    rows = [line for line in config_reference().splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []
