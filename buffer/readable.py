from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def visible(text: str) -> str:
    r"""Return a text with each character that could control a terminal as \uXXXX.

    JSON stays JSON of the same value. It demands this only for the first 32 characters, but U+009B
    begins an escape sequence, and U+202E reverses text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def format_size(number: float) -> str:
    """Return a number of bytes with a unit: 512 B, 1.5 MiB."""
    size, unit = float(int(number)), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.{min(unit, 1)}f} {_UNITS[unit]}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the sentence that begins a hint; "" if no known name is close."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}? " if close else ""


def shorten_reason(reason: str) -> str:
    """Cut a reason to what scripts accept: valid UTF-8 of 2,000 bytes at most."""
    return reason.encode(errors="replace")[:2000].decode(errors="ignore")
