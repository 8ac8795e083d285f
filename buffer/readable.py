"""JSON for a terminal: no character of it may control one, or turn its lines around."""

from __future__ import annotations


def visible(text: str) -> str:
    r"""Return JSON of the same value, with each unprintable character of a string as \uXXXX.

    JSON itself demands that for the first 32 only: U+009B begins an escape sequence, and U+202E
    reverses what follows.
    """
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
