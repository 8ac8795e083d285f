"""A console for untrusted text: control characters are made visible, markup is not read."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


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
    """Open a console without guessed colours; rich itself respects NO_COLOR and pipes."""
    return PlainConsole(highlight=False, emoji=False, markup=False, stderr=stderr)


def plain(text: str) -> str:
    """Return `text` with every character that could control a terminal made visible."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
