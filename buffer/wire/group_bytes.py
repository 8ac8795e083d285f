"""The wire format: one msgpack document per group, readable by any msgpack library.

    {"schema": 3, "gid": str, "task": str,
     "shared": {"messages": [...]?, "data_source": str?, "ground_truth": any?, "extra": {...}?,
                "tools": [...]?, "tool_choice": str or {...}?,
                "multimodal": [{"kind": str, "uri": str, "tokens": int?,
                                "grid_thw": [int, int, int]?}, ...]?,
                "sample": {...}?},
     "own": [[position, {any field of shared, "session_id": str?, "role": str?, "error": str?,
                         "tool_calls": [{"id": str, "name": str, "arguments": {...}?,
                                         "raw_arguments": str?}, ...]?,
                         "files": {column: address}?}], ...]?,
     "responses": [str, ...], "finish_reasons": [str, ...]?, "lineages": [str, ...]?,
     "rewards": [str, ...]?,
     "columns": {name: [offset, *shape], ...}, "pad": str?, "data": bin}

k rollouts, P prompt tokens, R response tokens of all rollouts, one after another:

    spans         int64[n, 5]    rollout, start, length, version, position in `lineages`
    rewards       float64[k, c]  by the names in `rewards`; NaN: this rollout has none
    indices       int32[k]       `index` of the rollout
    lengths       int32[k]       response tokens of the rollout
    prompt_ids    int32[P]
    response_ids  int32[R]
    logprobs      float32[R]
    statuses      uint8[k]       0 init, 1 completed, 2 aborted, 3 expired, 4 failed, 5 filtered,
                                 6 archived
    finishes      uint8[k]       position in `finish_reasons`; 255: none
    mask          uint8[R]       1: trained; without the column, all are

and of each column of `buffer.wire.columns` that a rollout has, and of those that packages attach:

    ref_logprobs, values, token_rewards  float32[R]   NaN for all tokens of a rollout without
    teacher_logprobs/<teacher>           float32[R]   NaN in the same way
    teacher_top_ids/<teacher>, teacher_top_logprobs/<teacher>   int32 and float32[R, k]   the most
                                 probable tokens; 0 and NaN for all tokens of a rollout without
    routed_experts/rows  int16[rows, layers, top_k]   P + tokens - 1 rows for each rollout with any
    routed_experts/of    uint8[k]    1: its experts are in the rows
    sampling_mask/counts  int32[R]   from how many tokens each was sampled; 0: from all, or not
    sampling_mask/ids     int32[sum of these]  their ids, with the sampled token's own among them

A large column (routed_experts, sampling_mask) may be in files: `files` has their addresses, with
their checksums (`buffer.maintenance.column_files`).

Every group has indices, lengths, prompt_ids, response_ids, logprobs and statuses. Columns are raw
little-endian arrays in `data`, in any order, each at a multiple of eight bytes; `pad` aligns
`data`, so that a reader can use columns as views of the received bytes.

Any writer may store the document in one zstd frame (magic 28 B5 2F FD, content size in its header,
no dictionary), and every reader must check for it
(`buffer.wire.framing`). Checksum and size of a payload are those of the stored bytes. Scripts never
see these bytes (I14).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import attrgetter

import msgpack

from buffer.errors import WireError
from buffer.wire.checks import check_containers, check_groups
from buffer.wire.document import SCHEMA, Columns, Head, encode_value, pack, read, unpack
from buffer.wire.framing import ALIGNMENT, MAX_BYTES, Data, expand, split_turns
from buffer.wire.group import RolloutGroup
from buffer.wire.seal import Seal

_SCHEMA_ENTRY = msgpack.packb("schema") + msgpack.packb(SCHEMA)
_DATA_KEY = msgpack.packb("data")
_BIN_32 = struct.Struct(">BI")
_NO_DATA = msgpack.packb(b"")
# by the number of bytes to the alignment
_PADS = [
    msgpack.packb("pad") + msgpack.packb(" " * count) + _DATA_KEY for count in range(ALIGNMENT)
]

_FIXED_MAP = 0x80

_fields = attrgetter(*Head.__struct_fields__)


def encode(group: RolloutGroup) -> bytes:
    """Return the bytes of a group, with one copy of its columns. Raises WireError."""
    directory, pieces, size = pack(_written(group.columns))
    return b"".join(_document(_head(group, directory), pieces, size))


def encode_checked(group: RolloutGroup) -> bytes:
    """Return the bytes of a group, and raise as `decode` if they cannot be read."""
    return b"".join(pieces_checked(group))


def pieces_checked(group: RolloutGroup) -> list[bytes | memoryview]:
    """Return the bytes in pieces, large columns in place: keep the group unchanged until sent."""
    return _pieces([group])[0]


def pieces_each(groups: Sequence[RolloutGroup]) -> list[list[bytes | memoryview] | Exception]:
    """Return of each group what `pieces_checked` returns or raises."""
    try:
        return [*_pieces(groups)]
    except Exception:  # a user's objects may raise anything; only one group has to
        return list(map(_pieces_or_error, groups))


def _pieces_or_error(group: RolloutGroup) -> list[bytes | memoryview] | Exception:
    try:
        return pieces_checked(group)
    except Exception as error:
        return error


def _pieces(groups: Sequence[RolloutGroup]) -> list[list[bytes | memoryview]]:
    # each step for all groups, as in `_decoded`
    packed = [pack(_written(group.columns)) for group in groups]
    heads = [_head(group, made[0]) for group, made in zip(groups, packed, strict=True)]
    for head in heads:
        read(head + _PADS[0] + _NO_DATA)
    check_groups([group.head for group in groups], [group.columns for group in groups])
    return [_document(head, made[1], made[2]) for head, made in zip(heads, packed, strict=True)]


def decode(data: Data) -> RolloutGroup:
    """Return the group, with columns as views of `data`. Raises SchemaVersionError, WireError.

    Of a group whose agents are at work, it is the group as it was claimed, and its `turns`.
    """
    return decode_each([data], [""])[0]


def decode_each(payloads: Sequence[Data], crcs: Sequence[str]) -> list[RolloutGroup]:
    """Return the groups of payloads, each as `decode` does. Raises the first one's error.

    `crcs`: their checksums, which the caller has compared, or "".
    """
    parts = list(map(split_turns, payloads))
    sums = [
        int(crc, 16) if crc and documents[0] is data else None
        for data, crc, documents in zip(payloads, crcs, parts, strict=True)
    ]
    groups = _decoded([documents[0] for documents in parts], sums)
    for group, documents in zip(groups, parts, strict=True):
        if turns := documents[1:]:
            made = _decoded(turns, [None] * len(turns))
            group.turns = [state for turn in made for state in turn.states]
    return groups


def _decoded(stored: Sequence[Data], sums: Sequence[int | None]) -> list[RolloutGroup]:
    # Each step for all documents: a third faster than all steps for each, because a document
    # drives the code of the other steps out of the processor's cache (measured).
    plain = list(map(_plain, stored))
    documents = list(map(read, plain))
    columns = [unpack(document.columns, document.data) for document in documents]
    bounds = check_groups(documents, columns)
    seals = [
        Seal(head, part, data, known if data is as_stored else None)
        for head, part, data, as_stored, known in zip(
            documents, columns, plain, stored, sums, strict=True
        )
    ]
    return list(map(RolloutGroup.received, documents, columns, bounds, seals))


def _plain(stored: Data) -> Data:
    data = expand(stored)
    if len(data) > MAX_BYTES:
        raise WireError(
            f"the document has {len(data)} bytes", hint=f"at most {MAX_BYTES} are accepted"
        )
    check_containers(data)
    return data


def _written(columns: Columns) -> Columns:
    """Return the columns without a mask of ones."""
    if "mask" in columns and 0 not in columns["mask"].tobytes():
        return {name: column for name, column in columns.items() if name != "mask"}
    return columns


def _head(group: RolloutGroup, directory: dict[str, list[int]]) -> bytes:
    """Return the beginning of the document, up to the last value before `pad`."""
    # of a received group, the head is the document: its data is not written again
    fields = dict(zip(Head.__struct_fields__, _fields(group.head), strict=True))
    head = Head(**fields | {"columns": directory})
    try:
        packed = encode_value(head)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(
            f"group {group.gid} has a value that msgpack cannot encode: {error}",
            hint="use text, numbers, lists and maps in messages, ground_truth, extra and reward",
        ) from error
    entries = packed[0] - _FIXED_MAP + len(("schema", "pad", "data"))
    return b"".join([bytes([_FIXED_MAP + entries]), _SCHEMA_ENTRY, packed[1:]])


def _document(head: bytes, pieces: list[bytes | memoryview], size: int) -> list[bytes | memoryview]:
    missing = -(len(head) + len(_PADS[0]) + _BIN_32.size) % ALIGNMENT
    start = b"".join([head, _PADS[missing], _BIN_32.pack(0xC6, size)])
    return [start, *pieces]
