"""The document that `group_bytes` specifies: its types, which msgspec checks, and its columns.

Columns are raw little-endian arrays, one after another in one buffer, each at a multiple of eight
bytes, so that readers use it in place. A directory names those of a group: {name: [offset in
bytes, *shape]}. `CORE` has what every document may have, `buffer.wire.columns` the optional ones.
"""

from __future__ import annotations

import contextlib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from operator import lt
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType
from numpy.typing import NDArray
from pydantic import ValidationError

from buffer.errors import SchemaVersionError, WireError
from buffer.wire.column import Layout
from buffer.wire.columns import column_named
from buffer.wire.framing import ALIGNMENT
from buffer.wire.rollout import MediaRef, Status, ToolCall
from buffer.wire.sampling import Count, SampleParams, StructuredOutput

SCHEMA = 3

STATUSES = tuple(Status)
"""The order is part of the wire format: column `statuses` holds positions in it."""

NO_FINISH = 255
"""In column `finishes`: no finish reason."""

MAX_MEMBERS = 4096
"""Rollouts of one group; the scripts accept no more."""


class _Map(Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A map without unknown keys, which the garbage collector need not track."""


class Shared(_Map):
    messages: list[dict[str, Any]] = []
    data_source: str | None = None
    ground_truth: Any = None
    extra: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    multimodal: list[MediaRef] = []
    sample: SampleParams = SampleParams()


class Own(_Map):
    """What one rollout has of its own; a field of `Shared` that is set replaces the group's."""

    messages: list[dict[str, Any]] | UnsetType = UNSET
    data_source: str | UnsetType | None = UNSET
    ground_truth: Any | UnsetType = UNSET
    extra: dict[str, Any] | UnsetType = UNSET
    tools: list[dict[str, Any]] | UnsetType | None = UNSET
    tool_choice: str | dict[str, Any] | UnsetType | None = UNSET
    multimodal: list[MediaRef] | UnsetType = UNSET
    sample: SampleParams | UnsetType = UNSET
    session_id: str | None = None
    role: Annotated[str, Meta(max_length=64)] = ""
    error: str | None = None
    tool_calls: list[ToolCall] = []
    files: dict[str, str] = {}
    """addresses of large columns, by the column's name"""


Shape = Annotated[list[Count], Meta(min_length=2, max_length=4)]
"""Offset of a column in the data, then its shape."""


class Head(_Map, kw_only=True):
    """Everything but the columns. `own`: by position in the group, ascending."""

    gid: Annotated[str, Meta(max_length=128)]
    task: Annotated[str, Meta(max_length=64)]
    shared: Shared
    own: Annotated[list[tuple[Count, Own]], Meta(max_length=MAX_MEMBERS)] = []
    responses: Annotated[list[str], Meta(min_length=1, max_length=MAX_MEMBERS)]
    finish_reasons: Annotated[list[str], Meta(max_length=255)] = []
    lineages: list[str] = []
    rewards: list[str] = []
    columns: dict[str, Shape]


class Document(Head, kw_only=True):
    """A whole group: `data` holds the columns; `pad` aligns it to eight bytes."""

    schema: int
    pad: str = ""
    data: memoryview


def _refuse_extension(code: int, _: memoryview) -> Any:
    raise WireError(f"msgpack extension type {code} is not part of the format")


def read_structure(_: type, value: Any) -> StructuredOutput:
    """Return a StructuredOutput, whose type msgspec does not know. Raises ValueError."""
    try:
        return StructuredOutput.model_validate(value, strict=True)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from error


def plain_structure(value: Any) -> dict[str, Any]:
    """Return a structure as the document has it. Raises TypeError for other values."""
    if isinstance(value, StructuredOutput):
        return value.model_dump(exclude_none=True)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


encode_value = msgspec.msgpack.Encoder(enc_hook=plain_structure).encode

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DECODER = msgspec.msgpack.Decoder(Document, dec_hook=read_structure, ext_hook=_refuse_extension)


def read(data: bytes | memoryview) -> Document:
    """Return the document in `data`, whose `data` is a view. Raises SchemaVersionError, WireError.

    WireError names the first value that is missing, unknown or of another type.
    """
    try:
        document: Document = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        _check_schema(data)
        raise WireError(_describe(error)) from error
    except _UNREADABLE as error:
        start = bytes(data[:16])
        raise WireError(f"not a msgpack document: {error} (it starts with {start!r})") from error
    if document.schema != SCHEMA:
        _check_schema(data)
    return document


class _AnyDocument(Struct, gc=False):
    schema: Any = None


def _check_schema(data: bytes | memoryview) -> None:
    try:
        schema = msgspec.msgpack.decode(data, type=_AnyDocument).schema
    except _UNREADABLE:
        return  # the caller raises what is wrong
    if schema != SCHEMA:
        raise SchemaVersionError(
            f"the document has schema {reprlib.repr(schema)}, this version reads {SCHEMA}"
        )


def _describe(error: msgspec.ValidationError) -> str:
    """Return "at where: what" for msgspec's "what - at `$.own[0]`"."""
    found = re.fullmatch(r"(.*?)(?: - at `\$\.(.*)`)?", str(error), re.DOTALL)
    what, where = found.groups() if found else (str(error), "")
    dotted = re.sub(r"\[(\d+)\]", r".\1", where or "the top").replace("[...]", "")
    return f"at {dotted[:200]}: {what[:200]}"


# msgspec (0.22) analyses these types at their first use and crashes when two threads do so at once;
# during an import there is only one thread
with contextlib.suppress(WireError):
    read(b"\x80")


# -- columns -------------------------------------------------------------

Columns = dict[str, NDArray[Any]]

CORE: Mapping[str, Layout] = {
    "spans": Layout(np.dtype("<i8"), 2, ""),
    "rewards": Layout(np.dtype("<f8"), 2, "rollout"),
    "indices": Layout(np.dtype("<i4"), 1, "rollout"),
    "lengths": Layout(np.dtype("<i4"), 1, "rollout"),
    "prompt_ids": Layout(np.dtype("<i4"), 1, "", holds_ids=True),
    "response_ids": Layout(np.dtype("<i4"), 1, "token", holds_ids=True),
    "logprobs": Layout(np.dtype("<f4"), 1, "token"),
    "statuses": Layout(np.dtype("u1"), 1, "rollout"),
    "finishes": Layout(np.dtype("u1"), 1, "rollout"),
    "mask": Layout(np.dtype("u1"), 1, "token"),
}

NEEDED = ("indices", "lengths", "prompt_ids", "response_ids", "logprobs", "statuses")

_COPIED_BYTES = 4096
_PADDING = [bytes(count) for count in range(ALIGNMENT)]


@lru_cache(1024)
def layout_of(name: str) -> Layout:
    """Return the layout of a column. Raises WireError for a name without a column."""
    if name in CORE:
        return CORE[name]
    row, _, part = name.partition("/")
    column = column_named(row)
    layout = column.layout(part) if column else None
    if layout is None:
        raise WireError(
            f"at columns: unknown column {reprlib.repr(name)}",
            hint="install the package that attaches it",
        )
    return layout


@lru_cache(1024)
def _numbers_of(name: str) -> tuple[np.dtype[Any], int, int]:
    """Return the type of a column, the number of its dimensions, and the bytes of a number."""
    layout = layout_of(name)
    return layout.dtype, layout.ndim, layout.dtype.itemsize


def ids_of(columns: Columns) -> list[str]:
    """Return the names of the columns that hold token ids."""
    if columns.keys() <= CORE.keys():
        return ["prompt_ids", "response_ids"]
    return [name for name in columns if layout_of(name).holds_ids]


def optional_of(columns: Columns) -> list[str]:
    """Return the names of the optional columns, without their parts, in the order of the bytes."""
    if columns.keys() <= CORE.keys():
        return []
    return [*dict.fromkeys(name.partition("/")[0] for name in columns if name not in CORE)]


def tokens_of(columns: Columns) -> list[slice]:
    """Return the part of each rollout in columns of response tokens."""
    ends = np.cumsum(columns["lengths"]).tolist()
    lengths = columns["lengths"].tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def pack(columns: Columns) -> tuple[dict[str, list[int]], list[bytes | memoryview], int]:
    """Return the directory of the columns, the pieces of the buffer to join, and its size in bytes.

    Large columns are not copied. Raises WireError.
    """
    directory = {}
    pieces: list[bytes | memoryview] = []
    small = b""
    size = 0
    for name, column in columns.items():
        dtype, ndim, _ = _numbers_of(name)
        if column.dtype != dtype or column.ndim != ndim:
            raise WireError(f"column {name} is {column.dtype}{list(column.shape)}, not {dtype}")
        directory[name] = [size, *column.shape]
        count = column.nbytes
        padding = _PADDING[-count % ALIGNMENT]
        size += count + len(padding)
        if count < _COPIED_BYTES:
            small += column.tobytes() + padding
        else:
            pieces += [small, np.ascontiguousarray(column).data.cast("B")]
            small = padding
    return directory, [*pieces, small], size


def unpack(directory: Mapping[str, list[int]], data: memoryview) -> Columns:
    """Return the columns as views of `data`. Raises WireError for another layout."""
    columns = {}
    end = 0
    for name, entry in _by_offset(directory):
        dtype, ndim, size = _numbers_of(name)
        offset = entry[0]
        if len(entry) != 1 + ndim:
            raise WireError(f"at columns.{name}: {len(entry) - 1} dimensions, expected {ndim}")
        if offset < end or offset % ALIGNMENT:
            raise WireError(
                f"at columns.{name}: offset {offset}, expected a multiple of {ALIGNMENT} that is "
                f"not below {end}"
            )
        count = entry[1] if ndim == 1 else math.prod(entry[1:])
        end = offset + count * size
        if end > len(data):
            raise WireError(f"at columns.{name}: it ends at {end}, the data has {len(data)} bytes")
        try:
            columns[name] = np.ndarray(entry[1:], dtype, data, offset)
        except ValueError as error:  # no values, but dimensions that numpy does not have
            raise WireError(f"at columns.{name}: shape {entry[1:]}: {error}") from error
    for name in NEEDED:
        if name not in columns:
            raise WireError(f"at columns: {name} is missing")
    return columns


def _by_offset(directory: Mapping[str, list[int]]) -> Iterable[tuple[str, list[int]]]:
    """Return the entries in the order of their columns: maps have none in some languages."""
    offsets = [entry[0] for entry in directory.values()]
    if all(map(lt, offsets, offsets[1:])):
        return directory.items()
    return sorted(directory.items(), key=lambda item: (item[1][0], math.prod(item[1][1:])))
