"""The registry of optional columns: one row for each. All that is done with a column asks its row.

`COLUMNS` has the project's own, which are fields of `RolloutState`. An installed package attaches
others by entry points of the group `rolloutmq.columns`; they are in `RolloutState.columns`.

An array of a document has the name of its column, or `column/part` if a column has several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

import numpy as np

from buffer.errors import ConfigError, WireError
from buffer.imports import attached, load_object
from buffer.wire.column import Column
from buffer.wire.large_columns import LargeColumn, RaggedColumn, RowsColumn


def _fields(*columns: Column) -> dict[str, Column]:
    return {column.name: replace(column, is_field=True) for column in columns}


COLUMNS: Mapping[str, Column] = _fields(
    Column("ref_logprobs"),
    Column("values"),
    Column("token_rewards", resets=False),
    Column("teacher_logprobs", named=True),
    Column(
        *("teacher_top_ids", "<i4", 1),
        named=True,
        absent=0,
        lowest=0,
        holds_ids=True,
        beside=("teacher_top_logprobs",),
    ),
    Column(
        *("teacher_top_logprobs", "<f4", 1),
        named=True,
        pad=-np.inf,
        beside=("teacher_top_ids", "teacher_logprobs"),
    ),
    RowsColumn("routed_experts", "<i2", 2, lowest=0),
    RaggedColumn("sampling_mask", "<i4", holds_ids=True),
)


@cache
def attached_columns() -> Mapping[str, Column]:
    """Return the columns of installed packages. Raises ConfigError for what is no column."""
    found = {}
    for name, path in attached("rolloutmq.columns").items():
        column = load_object(path, kind="column")
        if not isinstance(column, Column) or column.name != name or not name.isidentifier():
            raise ConfigError(f"{path} is no Column with the name {name!r}")
        if name in COLUMNS:
            raise ConfigError(f"{path}: the column {name} is rolloutmq's own", hint="rename it")
        found[name] = column
    return MappingProxyType(found)


def column_named(name: str) -> Column | None:
    """Return the column of this name; None if no row and no installed package has it."""
    return COLUMNS.get(name) or attached_columns().get(name)


def known_column(name: str) -> Column:
    """Return the column of this name. Raises WireError without one."""
    if column := column_named(name):
        return column
    raise WireError(
        f"unknown column {name!r:.80}",
        hint="install the package that attaches it; known: "
        + ", ".join([*COLUMNS, *attached_columns()]),
    )


def large_columns() -> dict[str, LargeColumn]:
    return {column.name: column for column in all_columns() if isinstance(column, LargeColumn)}


def all_columns() -> Iterator[Column]:
    yield from COLUMNS.values()
    yield from attached_columns().values()
