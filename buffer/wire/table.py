"""Turn the rollouts of a group into a head and columns, and back, without shared mutable values.

`shared` has the values of the first rollout; `own` has what others have instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.wire.document import OPTIONAL, Columns, Head, Own, Shared, encode_value
from buffer.wire.own_copy import own_copy, read_only
from buffer.wire.rollout import UNJUDGED, RolloutState, Status, VersionSpan, expert_rows
from buffer.wire.sampling import SampleParams
from buffer.wire.sampling_mask import RecordedMask, SamplingMask, joined_masks
from buffer.wire.teacher_columns import own_tops, tops_of

STATUSES = tuple(Status)
"""The order is part of the wire format: column `statuses` holds positions in it."""

NO_FINISH = 255  # in column `finishes`: no finish reason

Experts = NDArray[np.int16] | str | None

_CODES = {status: code for code, status in enumerate(STATUSES)}


def tabulate(gid: str, task: str, states: Sequence[RolloutState]) -> tuple[Head, Columns]:
    """Return rollouts as head (no directory yet) and columns. Raises WireError."""
    prompt = states[0].prompt_ids
    lengths = [len(state.response_ids) for state in states]
    finish_reasons, finishes = _finishes(states)
    reward_names, rewards = _rewards(states)
    lineages, spans = _spans(states)
    teachers, teacher_logprobs = _teachers(states, lengths)
    top_k, top_ids, top_logprobs = _tops(states, teachers, lengths)
    experts, has_experts = _experts([state.routed_experts for state in states])
    sampled = _sampling_mask([state.sampling_mask for state in states], lengths)
    columns = {
        "spans": spans,
        "rewards": rewards,
        "indices": np.array([state.index for state in states], "<i4"),
        "lengths": np.array(lengths, "<i4"),
        "prompt_ids": np.empty(0, "<i4") if prompt is None else np.array(prompt),
        "response_ids": np.concatenate([state.response_ids for state in states]),
        "logprobs": np.concatenate([state.logprobs for state in states]),
        "teacher_logprobs": teacher_logprobs,
        "teacher_top_ids": top_ids,
        "teacher_top_logprobs": top_logprobs,
        "routed_experts": experts,
        "statuses": np.array([_CODES[state.status] for state in states], "u1"),
        "finishes": finishes,
        "mask": _per_token([state.response_mask for state in states], lengths, 1, "u1"),
        "has_experts": has_experts,
    }
    if sampled:
        columns |= {"sampling_counts": sampled.counts, "sampling_ids": sampled.ids}
    for name in OPTIONAL:
        columns[name] = _per_token([getattr(state, name) for state in states], lengths)
    shared, own = _texts(states)
    head = Head(
        gid=gid,
        task=task,
        shared=shared,
        own=own,
        responses=[state.response for state in states],
        finish_reasons=finish_reasons,
        lineages=lineages,
        rewards=reward_names,
        teachers=teachers,
        teacher_top_k=top_k,
        columns={},
    )
    return head, {name: column for name, column in columns.items() if column is not None}


def _finishes(states: Sequence[RolloutState]) -> tuple[list[str], NDArray[np.uint8] | None]:
    codes: dict[str, int] = {}
    finishes = []
    for state in states:
        reason = state.finish_reason
        finishes.append(NO_FINISH if reason is None else codes.setdefault(reason, len(codes)))
    if len(codes) > NO_FINISH:
        raise WireError(f"{len(codes)} different finish reasons", hint=f"at most {NO_FINISH}")
    return list(codes), np.array(finishes, "u1") if codes else None


def _rewards(states: Sequence[RolloutState]) -> tuple[list[str], NDArray[np.float64] | None]:
    names = list(dict.fromkeys(name for state in states for name in state.reward or ()))
    if not names:
        return [], None
    rewards = np.full((len(states), len(names)), np.nan, "<f8")
    for n, state in enumerate(states):
        for name, value in (state.reward or {}).items():
            if value != value:
                raise WireError("a reward is NaN", hint="give a finite number for every name")
            rewards[n, names.index(name)] = value
    return names, rewards


def _spans(states: Sequence[RolloutState]) -> tuple[list[str], NDArray[np.int64] | None]:
    lineages: dict[str, int] = {}
    rows = [
        (n, span.start, span.length, span.version, lineages.setdefault(span.lineage, len(lineages)))
        for n, state in enumerate(states)
        for span in state.spans
    ]
    return list(lineages), np.array(rows, "<i8") if rows else None


def _per_token(
    columns: Sequence[NDArray[Any] | None],
    lengths: Sequence[int],
    absent: float = np.nan,
    dtype: str = "<f4",
) -> NDArray[Any] | None:
    """Return a column over all tokens, `absent` for a rollout without; None where none has it."""
    if not any(column is not None and len(column) for column in columns):
        return None
    row = next(column.shape[1:] for column in columns if column is not None and len(column))
    filled = zip(columns, lengths, strict=True)
    whole: NDArray[Any] = np.concatenate(
        [np.full((n, *row), absent, dtype) if column is None else column for column, n in filled]
    )
    return whole


def _teachers(
    states: Sequence[RolloutState], lengths: Sequence[int]
) -> tuple[list[str], NDArray[np.float32] | None]:
    if not any(state.teacher_logprobs for state in states):
        return [], None
    given = [state.teacher_logprobs or {} for state in states]
    names = sorted({name for columns in given for name, column in columns.items() if len(column)})
    rows = [_per_token([columns.get(name) for columns in given], lengths) for name in names]
    return names, np.array(rows, "<f4") if names else None


def _tops(
    states: Sequence[RolloutState], teachers: Sequence[str], lengths: Sequence[int]
) -> tuple[list[int], NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """Return k of each teacher, and the top tokens of all teachers side by side."""
    given = [(state.teacher_top_ids or {}, state.teacher_top_logprobs or {}) for state in states]
    if not any(ids for ids, _ in given):
        return [], None, None
    top_k, blocks = [], []
    for name in teachers:
        # a rollout without tokens has none of any width
        pairs = [
            (ids[name], logprobs.get(name)) if len(ids.get(name, ())) else (None, None)
            for ids, logprobs in given
        ]
        widths = {rows.shape[1] for pair in pairs for rows in pair if rows is not None}
        if len(widths) > 1:
            raise WireError(f"top tokens of {name!r} have different numbers k: {sorted(widths)}")
        top_k.append(max(widths, default=0))
        if widths:
            ids = _per_token([pair[0] for pair in pairs], lengths, 0, "<i4")
            blocks.append((ids, _per_token([pair[1] for pair in pairs], lengths)))
    if not blocks:
        return [], None, None
    all_ids, all_logprobs = zip(*blocks, strict=True)
    return top_k, np.concatenate(all_ids, axis=1), np.concatenate(all_logprobs, axis=1)


def _experts(
    experts: Sequence[Experts],
) -> tuple[NDArray[np.int16] | None, NDArray[np.uint8] | None]:
    inline = [rows for rows in experts if isinstance(rows, np.ndarray)]
    if not inline:
        return None, None
    if len({rows.shape[1:] for rows in inline}) > 1:
        shapes = [list(rows.shape) for rows in inline]
        raise WireError(f"routed_experts have different shapes: {shapes}")
    has_experts = np.array([isinstance(rows, np.ndarray) for rows in experts], "u1")
    return np.concatenate(inline), has_experts


def _sampling_mask(masks: Sequence[RecordedMask], lengths: Sequence[int]) -> SamplingMask | None:
    inline = [mask if isinstance(mask, SamplingMask) else None for mask in masks]
    joined = joined_masks(zip(inline, lengths, strict=True))
    return joined if isinstance(joined, SamplingMask) else None


# -- texts ---------------------------------------------------------------


_SHARED = ("messages", "data_source", "ground_truth", "extra", "tools", "tool_choice", "multimodal")


def _texts(states: Sequence[RolloutState]) -> tuple[Shared, list[tuple[int, Own]]]:
    """Return what the rollouts share, and what single ones have instead or besides."""
    first = _shared_values(states[0])
    common = _encoded(first)
    own = []
    for n, state in enumerate(states):
        fields = _own_values(state)
        values = _shared_values(state) if n else first
        if n and (common is None or _encoded(values) != common):
            for name, value in values.items():
                known = _encoded(first[name])
                if known is None or _encoded(value) != known:
                    fields[name] = own_copy(value)
        if fields:
            own.append((n, Own(**fields)))
    return Shared(**own_copy(first)), own


def _shared_values(state: RolloutState) -> dict[str, Any]:
    values = {name: getattr(state, name) for name in _SHARED}
    # what has its default is left out of the document
    values["sample"] = SampleParams(**state.sample_params.given())
    return values


def _encoded(value: Any) -> bytes | None:
    """Return a value as bytes, in which 1 and True differ; None for what `encode` will refuse."""
    try:
        return encode_value(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _own_values(state: RolloutState) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if state.session_id is not None:
        fields["session_id"] = state.session_id
    if state.role:
        fields["role"] = state.role
    if state.error is not None:
        fields["error"] = state.error
    if state.tool_calls:
        fields["tool_calls"] = own_copy(state.tool_calls)
    for name in UNJUDGED:
        if isinstance(address := getattr(state, name), str):
            fields[name] = address
    return fields


# -- rollouts ------------------------------------------------------------


def rollouts(head: Head, columns: Columns) -> Iterator[RolloutState]:
    """Yield the rollouts of a group, with columns as read-only parts of the group's."""
    columns = {name: read_only(column) for name, column in columns.items()}
    spans = spans_of(head, columns)
    experts = experts_of(head, columns)
    masks = masks_of(head, columns)
    tops = tops_of(head, columns)
    own = dict(head.own)
    shared = _state_fields(head.shared)
    ends = np.cumsum(columns["lengths"]).tolist()
    for n, (end, length) in enumerate(zip(ends, columns["lengths"].tolist(), strict=True)):
        part = slice(end - length, end)
        mask = columns["mask"][part] if "mask" in columns else None
        code = int(columns["finishes"][n]) if "finishes" in columns else NO_FINISH
        fields = shared | _state_fields(own[n]) if n in own else shared
        yield RolloutState(
            **own_copy(fields),
            **{name: _own_part(columns.get(name), part) for name in OPTIONAL},
            index=int(columns["indices"][n]),
            prompt_ids=columns["prompt_ids"],
            response=head.responses[n],
            response_ids=columns["response_ids"][part],
            logprobs=columns["logprobs"][part],
            response_mask=None if mask is None or mask.all() else mask,
            teacher_logprobs=_own_teachers(head.teachers, columns, part),
            **own_tops(tops, part),
            routed_experts=experts[n],
            sampling_mask=masks[n],
            spans=spans[n],
            reward=_reward(head.rewards, columns, n),
            finish_reason=None if code == NO_FINISH else head.finish_reasons[code],
            status=STATUSES[int(columns["statuses"][n])],
        )


def spans_of(head: Head, columns: Columns) -> list[list[VersionSpan]]:
    found: list[list[VersionSpan]] = [[] for _ in head.responses]
    if "spans" in columns:
        for n, start, length, version, lineage in columns["spans"].tolist():
            found[n].append(VersionSpan(start, length, version, head.lineages[lineage]))
    return found


def experts_of(head: Head, columns: Columns) -> list[Experts]:
    """Return the experts of each rollout: their rows, their address, or None."""
    found: list[Experts] = [None] * len(head.responses)
    for n, own in head.own:
        found[n] = own.routed_experts
    if "routed_experts" in columns:
        start = 0
        for n in np.flatnonzero(columns["has_experts"]).tolist():
            end = start + expert_rows(len(columns["prompt_ids"]), int(columns["lengths"][n]))
            found[n] = columns["routed_experts"][start:end]
            start = end
    return found


def masks_of(head: Head, columns: Columns) -> list[RecordedMask]:
    """Return the sampling mask of each rollout, its address, or None."""
    found: list[RecordedMask] = [None] * len(head.responses)
    if "sampling_ids" in columns:
        start = first = 0
        for n, length in enumerate(columns["lengths"].tolist()):
            counts = columns["sampling_counts"][start : start + length]
            if ids := int(counts.sum(dtype=np.int64)):
                found[n] = SamplingMask(counts, columns["sampling_ids"][first : first + ids])
            start, first = start + length, first + ids
    for n, own in head.own:
        found[n] = own.sampling_mask or found[n]
    return found


def _reward(names: Sequence[str], columns: Columns, n: int) -> dict[str, float] | None:
    if "rewards" not in columns:
        return None
    present = zip(names, columns["rewards"][n].tolist(), strict=True)
    return {name: value for name, value in present if value == value} or None


def _own_part(column: NDArray[np.float32] | None, part: slice) -> NDArray[np.float32] | None:
    """Return the part of a rollout in an optional column; None where it has none."""
    if column is None or part.start == part.stop or np.isnan(column[part.start]):
        return None
    return column[part]


def _own_teachers(
    teachers: Sequence[str], columns: Columns, part: slice
) -> dict[str, NDArray[np.float32]] | None:
    if not teachers:
        return None
    rows = zip(teachers, columns["teacher_logprobs"], strict=True)
    parts = {name: _own_part(row, part) for name, row in rows}
    return {name: own for name, own in parts.items() if own is not None} or None


def _state_fields(texts: Shared | Own) -> dict[str, Any]:
    """Return the set fields as `RolloutState` takes them."""
    values = {name: getattr(texts, name) for name in texts.__struct_fields__}
    fields = {name: value for name, value in values.items() if value is not UNSET}
    for name in UNJUDGED:  # from `experts_of` and `masks_of`
        fields.pop(name, None)
    if "sample" in fields:
        fields["sample_params"] = fields.pop("sample")
    return fields
