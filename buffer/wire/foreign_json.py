"""Read JSON that somebody else wrote: the body of a request, or the answer of another server."""

from __future__ import annotations

from typing import Any

import orjson

from buffer.errors import WireError

MAX_DEPTH = 64
"""Code that walks a value calls itself once or more for each level, and Python allows 1,000."""


def read_json(text: bytes | str, what: str, *, most: int = 1 << 20) -> Any:
    """Return the value of a JSON text of at most `most` bytes, which errors name `what`.

    Raises WireError if it is longer, no JSON, or nested too deep.
    """
    if len(text) > most:
        raise WireError(f"{what} has more than {most} bytes")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise WireError(f"{what} is not valid JSON: {error}: {text[:80]!r}") from error
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [each for each in level if isinstance(each, dict | list)]
        if not containers:
            return value
        level = [
            item
            for each in containers
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    raise WireError(f"{what} is nested more than {MAX_DEPTH} deep")
