from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated

from pydantic import ByteSize, GetPydanticSchema
from pydantic_core.core_schema import no_info_after_validator_function

REASON_BYTES = 2000


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


Bytes = Annotated[
    int,
    # a plain int, because a Redis client sends no ByteSize
    GetPydanticSchema(
        lambda _, schema_of: no_info_after_validator_function(int, schema_of(ByteSize))
    ),
]
"""A field that is read from a number, or from text like "8GiB" or "500MB"."""


def format_size(number: float) -> str:
    """Return a number of bytes with a unit: 512 B, 1.5 MiB."""
    return ByteSize(number).human_readable(separator=" ")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the sentence that begins a hint; "" if no known name is close."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}? " if close else ""


def shorten_reason(reason: str) -> str:
    """Cut a reason to what scripts accept: valid UTF-8 of REASON_BYTES at most."""
    return reason.encode(errors="replace")[:REASON_BYTES].decode(errors="ignore")
