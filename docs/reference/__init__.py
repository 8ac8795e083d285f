"""The reference pages of docs/pages, made from the code: `make reference`.

To add a page, write a module with a function that returns its Markdown and add it to `REFERENCES`;
tests/docs/test_reference.py fails while a committed page differs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.reference.commands import command_reference
from docs.reference.config import config_reference
from docs.reference.keys import key_reference
from docs.reference.metrics import metric_reference

PAGES = Path(__file__).parents[1] / "pages"

REFERENCES: dict[str, Callable[[], str]] = {
    "command_reference.md": command_reference,
    "config_reference.md": config_reference,
    "key_reference.md": key_reference,
    "metric_reference.md": metric_reference,
}
"""By the name of the page: the function that returns it."""
