"""Numbers of bytes, as programs count them and as people write them."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, GetPydanticSchema
from pydantic_core.core_schema import no_info_after_validator_function

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
