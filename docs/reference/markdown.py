"""Markdown of the reference pages."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(_cell(text) for text in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    # outside of backquotes, a browser would take <task> for a tag
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return " ".join("`".join(parts).split())


def verbatim(text: str) -> str:
    """Return a block of text that is shown as it is."""
    return f"```text\n{text}\n```\n"
