"""The reference pages of the site, made from the code by `make docs` (docs/repository.py).

To add a page, write a module with a function that returns its Markdown and add it to `REFERENCES`.
"""

from __future__ import annotations

from collections.abc import Callable

from docs.reference.commands import command_reference
from docs.reference.config import config_reference
from docs.reference.keys import key_reference
from docs.reference.metrics import metric_reference

REFERENCES: dict[str, Callable[[], str]] = {
    "docs/pages/command_reference.md": command_reference,
    "docs/pages/config_reference.md": config_reference,
    "docs/pages/key_reference.md": key_reference,
    "docs/pages/metric_reference.md": metric_reference,
}
"""The function that returns each page, by its path on the site."""
