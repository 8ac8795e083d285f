"""A console for untrusted text: control characters are made visible, markup is not read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

UNBOUNDED = 10_000
"""A width that no line reaches."""


class PlainConsole(Console):
    """A console that prints every text as `plain` returns it.

    Rollouts and names of workers come from other machines: an escape sequence in one of them could
    rewrite the screen or the clipboard of an operator.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def console(*, stderr: bool = False) -> Console:
    """Open a console without guessed colours; rich itself respects NO_COLOR.

    Where the output is no terminal, lines are as wide as their content, unless COLUMNS is set.
    """
    opened = PlainConsole(highlight=False, emoji=False, markup=False, stderr=stderr)
    if os.environ.get("COLUMNS", "0").strip("0") == "":
        size = shutil.get_terminal_size()
        opened.width = size.columns if opened.is_terminal else UNBOUNDED
    return opened


def plain(text: str) -> str:
    """Return `text` with every character that could control a terminal made visible."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
