"""The columns that teachers add to a group: logprobs of its tokens, and their own top tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from isal import isal_zlib
from msgspec import structs
from numpy.typing import NDArray

from buffer.wire.document import Columns, Head
from buffer.wire.rollout import TEACHERS

if TYPE_CHECKING:
    from buffer.wire.group import RolloutGroup


def tops_of(head: Head, columns: Columns) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return the top tokens of each teacher with any: ids and logprobs, [R, k]."""
    if not head.teacher_top_k:
        return {}
    ends = np.cumsum(head.teacher_top_k).tolist()
    parts = zip(head.teachers, head.teacher_top_k, ends, strict=True)
    blocks = ((name, slice(end - k, end)) for name, k, end in parts if k)
    return {
        name: (columns["teacher_top_ids"][:, block], columns["teacher_top_logprobs"][:, block])
        for name, block in blocks
    }


def own_tops(
    tops: Mapping[str, tuple[NDArray[Any], NDArray[Any]]], part: slice
) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the fields of a rollout, whose tokens are `part` of the group's."""
    own = {
        name: (ids[part], logprobs[part])
        for name, (ids, logprobs) in tops.items()
        if part.start < part.stop and not np.isnan(logprobs[part.start, 0])
    }
    if not own:
        return {}
    return {
        "teacher_top_ids": {name: ids for name, (ids, _) in own.items()},
        "teacher_top_logprobs": {name: logprobs for name, (_, logprobs) in own.items()},
    }


def with_teacher(
    group: RolloutGroup,
    teacher: str,
    logprobs: NDArray[np.float32],
    top: tuple[NDArray[np.int32], NDArray[np.float32]],
) -> RolloutGroup:
    """Return the group with a teacher's columns, float32[sum R] and two of [sum R, k].

    They replace what the teacher gave before; everything else stays byte for byte.
    """
    rows = dict(zip(group.head.teachers, group.columns.get("teacher_logprobs", ()), strict=True))
    rows[teacher] = logprobs
    tops = {
        name: block for name, block in tops_of(group.head, group.columns).items() if name != teacher
    }
    if top[0].shape[1]:
        tops[teacher] = top
    blocks = [tops[name] for name in rows if name in tops]
    top_k = [tops[name][0].shape[1] if name in tops else 0 for name in rows]
    columns = {name: column for name, column in group.columns.items() if name not in TEACHERS}
    columns["teacher_logprobs"] = np.array([*rows.values()], "<f4")
    if blocks:
        columns["teacher_top_ids"] = np.concatenate([ids for ids, _ in blocks], 1)
        columns["teacher_top_logprobs"] = np.concatenate([values for _, values in blocks], 1)
    head = structs.replace(group.head, teachers=[*rows], teacher_top_k=top_k if blocks else [])
    return group.with_parts(head, columns)


def sampled_crc(group: RolloutGroup) -> str:
    """Return the checksum of all columns but those of teachers, in hex."""
    head, total = group.head, 0
    for name, column in sorted(group.columns.items()):
        # a mask that trains all may be left out
        if name not in TEACHERS and not (name == "mask" and column.all()):
            total = isal_zlib.crc32(name.encode(), total)
            total = isal_zlib.crc32(np.ascontiguousarray(column), total)
    names = repr((head.lineages, head.rewards, head.finish_reasons, head.responses))
    return f"{isal_zlib.crc32(names.encode(errors='replace'), total):x}"
