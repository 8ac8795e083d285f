"""Turns the rollouts of a group into a table, and a table into rollouts.

Neither shares anything with the other that can be changed; nor do two rollouts of a table. What
rollouts have in common is in `shared`, as the first one has it; what another one has instead
is in `own`. Numbers are columns (`buffer.wire.columns`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.wire.columns import Columns
from buffer.wire.document import Call, Media, Own, Sample, Shared, Structure
from buffer.wire.own_copy import own_copy, read_only
from buffer.wire.rollout import (
    MediaRef,
    RolloutState,
    Status,
    ToolCall,
    VersionSpan,
    expert_rows,
)
from buffer.wire.sampling import SampleParams, StructuredOutput

STATUSES = tuple(Status)
"""Column `statuses` holds positions in it: the order is part of the wire format."""

NO_FINISH = 255
"""In column `finishes`: the rollout has no finish reason."""

_CODES = {status: code for code, status in enumerate(STATUSES)}
_SAMPLE_DEFAULTS = dict(SampleParams())
_encode = msgspec.msgpack.Encoder().encode


class Table(NamedTuple):
    """The rollouts of a group. `own`: by position. `columns`: those that some rollout has."""

    shared: Shared
    own: dict[int, Own]
    responses: list[str]
    finish_reasons: list[str]
    lineages: list[str]
    reward_names: list[str]
    teachers: list[str]
    columns: Columns


def tabulate(states: Sequence[RolloutState]) -> Table:
    """Return the table of these rollouts. Raises WireError where they do not fit together."""
    prompt = states[0].prompt_ids
    lengths = [len(state.response_ids) for state in states]
    finish_reasons, finishes = _finishes(states)
    reward_names, rewards = _rewards(states)
    lineages, spans = _spans(states)
    teachers, teacher_logprobs = _teachers(states, lengths)
    experts = [s.routed_experts for s in states]
    columns = {
        "spans": spans,
        "rewards": rewards,
        "indices": np.array([state.index for state in states], "<i4"),
        "lengths": np.array(lengths, "<i4"),
        "prompt_ids": np.empty(0, "<i4") if prompt is None else np.array(prompt),
        "response_ids": np.concatenate([state.response_ids for state in states]),
        "logprobs": np.concatenate([state.logprobs for state in states]),
        "ref_logprobs": _optional([state.ref_logprobs for state in states], lengths),
        "values": _optional([state.values for state in states], lengths),
        "token_rewards": _optional([state.token_rewards for state in states], lengths),
        "teacher_logprobs": teacher_logprobs,
        "routed_experts": _experts(experts),
        "statuses": np.array([_CODES[state.status] for state in states], "u1"),
        "finishes": finishes,
        "mask": _mask(states, lengths),
        "has_experts": _has_experts(experts),
    }
    present = {name: column for name, column in columns.items() if column is not None}
    shared, own = _texts(states)
    responses = [state.response for state in states]
    return Table(shared, own, responses, finish_reasons, lineages, reward_names, teachers, present)


def _finishes(states: Sequence[RolloutState]) -> tuple[list[str], NDArray[np.uint8] | None]:
    reasons = [state.finish_reason for state in states]
    names = list(dict.fromkeys(reason for reason in reasons if reason is not None))
    if not names:
        return [], None
    if len(names) > NO_FINISH:
        raise WireError(f"{len(names)} different finish reasons", hint=f"at most {NO_FINISH}")
    codes: dict[str | None, int] = {name: code for code, name in enumerate(names)}
    return names, np.array([codes.get(reason, NO_FINISH) for reason in reasons], "u1")


def _rewards(states: Sequence[RolloutState]) -> tuple[list[str], NDArray[np.float64] | None]:
    names = list(dict.fromkeys(name for state in states for name in state.reward or ()))
    if not names:
        return [], None
    nan = float("nan")
    rows = [[(state.reward or {}).get(name, nan) for name in names] for state in states]
    rewards = np.array(rows, "<f8")
    given = sum(len(state.reward or ()) for state in states)
    if np.isnan(rewards).sum() != rewards.size - given:
        raise WireError("a reward is NaN", hint="give a finite number for every name")
    return names, rewards


def _spans(states: Sequence[RolloutState]) -> tuple[list[str], NDArray[np.int64] | None]:
    lineages: dict[str, int] = {}
    rows = [
        (n, span.start, span.length, span.version, lineages.setdefault(span.lineage, len(lineages)))
        for n, state in enumerate(states)
        for span in state.spans
    ]
    return list(lineages), np.array(rows, "<i8") if rows else None


def _optional(
    columns: Sequence[NDArray[np.float32] | None], lengths: Sequence[int]
) -> NDArray[np.float32] | None:
    """Return a column over all tokens, nan for a rollout without; None where no rollout has it."""
    if not any(column is not None and len(column) for column in columns):
        return None
    filled = zip(columns, lengths, strict=True)
    whole: NDArray[np.float32] = np.concatenate(
        [np.full(n, np.nan, "<f4") if column is None else column for column, n in filled]
    )
    return whole


def _teachers(
    states: Sequence[RolloutState], lengths: Sequence[int]
) -> tuple[list[str], NDArray[np.float32] | None]:
    given = [state.teacher_logprobs or {} for state in states]
    names = sorted({name for columns in given for name, column in columns.items() if len(column)})
    rows = [_optional([columns.get(name) for columns in given], lengths) for name in names]
    return names, np.array(rows, "<f4") if names else None


def _mask(states: Sequence[RolloutState], lengths: Sequence[int]) -> NDArray[np.uint8] | None:
    if all(state.response_mask is None for state in states):
        return None
    masks = zip((state.response_mask for state in states), lengths, strict=True)
    whole: NDArray[np.uint8] = np.concatenate(
        [np.ones(n, "u1") if mask is None else mask for mask, n in masks]
    )
    return whole


def _experts(experts: Sequence[NDArray[np.int16] | str | None]) -> NDArray[np.int16] | None:
    inline = [rows for rows in experts if isinstance(rows, np.ndarray)]
    if len({rows.shape[1:] for rows in inline}) > 1:
        shapes = [list(rows.shape) for rows in inline]
        raise WireError(f"routed_experts have different shapes: {shapes}")
    return np.concatenate(inline) if inline else None


def _has_experts(
    experts: Sequence[NDArray[np.int16] | str | None],
) -> NDArray[np.uint8] | None:
    inline = [isinstance(rows, np.ndarray) for rows in experts]
    return np.array(inline, "u1") if any(inline) else None


# -- texts ---------------------------------------------------------------


def _texts(states: Sequence[RolloutState]) -> tuple[Shared, dict[int, Own]]:
    """Return what the rollouts share, and what single ones have instead or besides."""
    shared = _shared(states[0])
    common = _bytes_of(states[0])
    own = {}
    for n, state in enumerate(states):
        fields = _own_fields(state)
        if n and (common is None or _bytes_of(state) != common):
            fields |= _differences(shared, _shared(state))
        if fields:
            own[n] = Own(**fields)
    return shared, own


def _bytes_of(state: RolloutState) -> bytes | None:
    """Return what is compared between rollouts as bytes, since 1 and True are equal in Python.

    None for values that the format does not have: `wire.encode` refuses the group and names them.
    """
    compared = (
        state.messages,
        state.data_source,
        state.ground_truth,
        state.extra,
        state.tools,
        state.tool_choice,
        [dict(media) for media in state.multimodal],
        state.sample_params.__dict__,
    )
    return _bytes(compared)


def _bytes(value: Any) -> bytes | None:
    try:
        return _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _shared(state: RolloutState) -> Shared:
    return Shared(
        messages=own_copy(state.messages),
        data_source=state.data_source,
        ground_truth=own_copy(state.ground_truth),
        extra=own_copy(state.extra),
        tools=own_copy(state.tools),
        tool_choice=own_copy(state.tool_choice),
        multimodal=[Media(**media.model_dump()) for media in state.multimodal],
        sample=_sample(state.sample_params),
    )


def _own_fields(state: RolloutState) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if state.session_id is not None:
        fields["session_id"] = state.session_id
    if state.error is not None:
        fields["error"] = state.error
    if state.tool_calls:
        fields["tool_calls"] = [Call(**call.model_dump()) for call in state.tool_calls]
    if isinstance(state.routed_experts, str):
        fields["routed_experts"] = state.routed_experts
    return fields


def _differences(shared: Shared, other: Shared) -> dict[str, Any]:
    """Return the fields of `other` that are not the same on the wire."""
    fields = {}
    for name in Shared.__struct_fields__:
        theirs = getattr(other, name)
        ours = _bytes(getattr(shared, name))
        if ours is None or _bytes(theirs) != ours:
            fields[name] = theirs
    return fields


def _sample(params: SampleParams) -> Sample:
    # what has its default is left out of the document
    given = {name: value for name, value in params if value != _SAMPLE_DEFAULTS[name]}
    fields = own_copy(given)
    if params.structured is not None:
        fields["structured"] = Structure(**dict(fields["structured"]))
    return Sample(**fields)


# -- rollouts ------------------------------------------------------------


def rollouts(table: Table) -> Iterator[RolloutState]:
    """Yield the rollouts of a table, with columns as read-only parts of the table's."""
    columns = {name: read_only(column) for name, column in table.columns.items()}
    prompt_ids = columns["prompt_ids"]
    finishes = columns.get("finishes")
    mask = columns.get("mask")
    spans = spans_of(table)
    experts = experts_of(table._replace(columns=columns))
    shared = _state_fields(table.shared)
    ends = np.cumsum(columns["lengths"]).tolist()
    for n, (end, length) in enumerate(zip(ends, columns["lengths"].tolist(), strict=True)):
        part = slice(end - length, end)
        own_mask = None if mask is None else mask[part]
        code = NO_FINISH if finishes is None else int(finishes[n])
        fields = dict(shared)
        if n in table.own:
            fields |= _state_fields(table.own[n])
        yield RolloutState(
            **own_copy(fields),
            index=int(columns["indices"][n]),
            prompt_ids=prompt_ids,
            response=table.responses[n],
            response_ids=columns["response_ids"][part],
            logprobs=columns["logprobs"][part],
            response_mask=None if own_mask is None or own_mask.all() else own_mask,
            ref_logprobs=_own(columns.get("ref_logprobs"), part),
            values=_own(columns.get("values"), part),
            token_rewards=_own(columns.get("token_rewards"), part),
            teacher_logprobs=_own_teachers(table.teachers, columns, part),
            routed_experts=experts[n],
            spans=spans[n],
            reward=_reward(table, n),
            finish_reason=None if code == NO_FINISH else table.finish_reasons[code],
            status=STATUSES[int(columns["statuses"][n])],
        )


def spans_of(table: Table) -> list[list[VersionSpan]]:
    """Return the spans of each rollout."""
    found: list[list[VersionSpan]] = [[] for _ in table.responses]
    if "spans" in table.columns:
        for n, start, length, version, lineage in table.columns["spans"].tolist():
            found[n].append(VersionSpan(start, length, version, table.lineages[lineage]))
    return found


def experts_of(table: Table) -> list[NDArray[np.int16] | str | None]:
    """Return the experts of each rollout: their rows, their address, or None."""
    found: list[NDArray[np.int16] | str | None] = [None] * len(table.responses)
    for n, own in table.own.items():
        found[n] = own.routed_experts
    columns = table.columns
    if "routed_experts" in columns:
        start = 0
        for n in np.flatnonzero(columns["has_experts"]).tolist():
            rows = expert_rows(len(columns["prompt_ids"]), int(columns["lengths"][n]))
            found[n] = columns["routed_experts"][start : start + rows]
            start += rows
    return found


def _reward(table: Table, n: int) -> dict[str, float] | None:
    if "rewards" not in table.columns:
        return None
    row = table.columns["rewards"][n].tolist()
    present = zip(table.reward_names, row, strict=True)
    return {name: value for name, value in present if value == value} or None


def _own(column: NDArray[np.float32] | None, part: slice) -> NDArray[np.float32] | None:
    """Return the part of a rollout in an optional column; None where it has none."""
    if column is None or part.start == part.stop or np.isnan(column[part.start]):
        return None
    return column[part]


def _own_teachers(
    teachers: Sequence[str], columns: Columns, part: slice
) -> dict[str, NDArray[np.float32]] | None:
    if "teacher_logprobs" not in columns:
        return None
    rows = zip(teachers, columns["teacher_logprobs"], strict=True)
    parts = {name: _own(row, part) for name, row in rows}
    return {name: own for name, own in parts.items() if own is not None} or None


def _state_fields(texts: Shared | Own) -> dict[str, Any]:
    """Return these fields as `RolloutState` takes them, without those that are not set."""
    values = {name: getattr(texts, name) for name in texts.__struct_fields__}
    fields = {name: value for name, value in values.items() if value is not UNSET}
    fields.pop("routed_experts", None)
    if "sample" in fields:
        fields["sample_params"] = _sample_params(fields.pop("sample"))
    if fields.get("multimodal"):
        fields["multimodal"] = [MediaRef(**msgspec.structs.asdict(m)) for m in fields["multimodal"]]
    if fields.get("tool_calls"):
        fields["tool_calls"] = [ToolCall(**msgspec.structs.asdict(c)) for c in fields["tool_calls"]]
    return fields


def _sample_params(sample: Sample) -> SampleParams:
    fields = msgspec.structs.asdict(sample)
    if sample.structured is not None:
        fields["structured"] = StructuredOutput(**msgspec.structs.asdict(sample.structured))
    return SampleParams(**fields)
