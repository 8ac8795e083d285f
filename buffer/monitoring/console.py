"""A console on which no text steers the terminal: control characters are made visible, markup is
not read.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


class PlainConsole(Console):
    """A console on which no text steers the terminal, wherever it comes from: see `plain`."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def console(*, stderr: bool = False) -> Console:
    """A console that colours nothing by guessing; NO_COLOR and pipes are respected by rich."""
    return PlainConsole(highlight=False, emoji=False, markup=False, stderr=stderr)


def plain(text: str) -> str:
    """The text with every character that could steer a terminal made visible."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
