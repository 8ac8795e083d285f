"""Read and write the arguments of calls without changing a value.

A model may write integers of any length, and line breaks within a text. Of a key that is written
twice, the last value counts, as in the JSON parsers of agents.
"""

from __future__ import annotations

import json
import math
from typing import Any


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for what JSON cannot express."""
    try:
        # orjson makes floats of integers over 64 bits, and refuses line breaks
        value = json.loads(text, strict=False, parse_float=_finite, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if "\\u" in text:
        write_json(value).encode()  # half of a surrogate pair is no text
    return value


def write_json(value: Any) -> str:
    """Return a value as JSON without white space. Raises ValueError if JSON cannot express it."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is beyond the range of a float")
    return number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")
