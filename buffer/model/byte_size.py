"""Numbers of bytes as people write them: 8GiB, 500 MB, 4096."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}iB": 1024**_power}


def parse_size(value: Any) -> Any:
    """Bytes of a text like "8GiB"; anything else is left for the caller to check. ValueError for
    other text.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", value)
    if found is None or found[2] not in _UNITS:
        raise ValueError('expected a number of bytes, or text like "8GiB" or "500MB"')
    return int(float(found[1]) * _UNITS[found[2]])


def format_size(number: float) -> str:
    """Bytes for people: 512 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


ByteSize = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
"""A field of a config: an integer, or text with a unit."""
