"""Turn the rollouts of a group into a head and columns, and back, without shared mutable values.

`shared` has the values of the first rollout; `own` has what others have instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.wire.column import parts_of, read_only
from buffer.wire.columns import COLUMNS, known_column
from buffer.wire.document import (
    NO_FINISH,
    STATUSES,
    Columns,
    Head,
    Own,
    Shared,
    encode_value,
    optional_of,
    tokens_of,
)
from buffer.wire.own_copy import own_copy
from buffer.wire.rollout import RolloutState, VersionSpan
from buffer.wire.sampling import SampleParams

_CODES = {status: code for code, status in enumerate(STATUSES)}


def tabulate(gid: str, task: str, states: Sequence[RolloutState]) -> tuple[Head, Columns]:
    """Return rollouts as head (no directory yet) and columns. Raises WireError."""
    prompt = states[0].prompt_ids
    lengths = [len(state.response_ids) for state in states]
    finish_reasons, finishes = _finishes(states)
    reward_names, rewards = _rewards(states)
    lineages, spans = _spans(states)
    mask = None
    if any(state.response_mask is not None for state in states):
        mask = np.concatenate([state.whole_mask() for state in states])
    columns = {
        "spans": spans,
        "rewards": rewards,
        "indices": np.array([state.index for state in states], "<i4"),
        "lengths": np.array(lengths, "<i4"),
        "prompt_ids": np.empty(0, "<i4") if prompt is None else np.array(prompt),
        "response_ids": np.concatenate([state.response_ids for state in states]),
        "logprobs": np.concatenate([state.logprobs for state in states]),
        "statuses": np.array([_CODES[state.status] for state in states], "u1"),
        "finishes": finishes,
        "mask": mask,
    }
    files: dict[int, dict[str, str]] = {}
    attached = sorted({name for state in states for name in state.columns})
    for name in (*COLUMNS, *attached):
        if name in COLUMNS:
            values = [getattr(state, name) for state in states]
        else:
            values = [_attached(name, state) for state in states]
        if any([value is not None for value in values]):
            columns |= known_column(name).joined(values, lengths)
            for n, value in enumerate(values):
                if isinstance(value, str):
                    files.setdefault(n, {})[name] = value
    shared, own = _texts(states, files)
    head = Head(
        gid=gid,
        task=task,
        shared=shared,
        own=own,
        responses=[state.response for state in states],
        finish_reasons=finish_reasons,
        lineages=lineages,
        rewards=reward_names,
        columns={},
    )
    return head, {name: column for name, column in columns.items() if column is not None}


def _attached(name: str, state: RolloutState) -> Any:
    """Return a checked value: `columns` is a dict in which anybody may put anything."""
    column = known_column(name)
    if (value := state.columns.get(name)) is None:
        return None
    try:
        value = column.read(value)
    except ValueError as error:
        raise WireError(str(error)) from error
    if problem := column.problem(value, state):
        raise WireError(problem)
    return value


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


# -- texts ---------------------------------------------------------------


_SHARED = ("messages", "data_source", "ground_truth", "extra", "tools", "tool_choice", "multimodal")
_OWN: dict[str, Any] = {"session_id": None, "role": "", "error": None, "tool_calls": []}
"""Fields that each rollout has for itself, and their defaults, which documents leave out."""


def _texts(
    states: Sequence[RolloutState], files: Mapping[int, dict[str, str]]
) -> tuple[Shared, list[tuple[int, Own]]]:
    """Return what the rollouts share, and what single ones have instead or besides."""
    first = _shared_values(states[0])
    common = _encoded(first)
    own = []
    for n, state in enumerate(states):
        fields: dict[str, Any] = {
            name: own_copy(value)
            for name, default in _OWN.items()
            if (value := getattr(state, name)) != default
        }
        if n in files:
            fields["files"] = files[n]
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


# -- rollouts ------------------------------------------------------------


def rollouts(head: Head, columns: Columns) -> Iterator[RolloutState]:
    """Yield the rollouts of a group, with columns as read-only parts of the group's."""
    columns = {name: read_only(column) for name, column in columns.items()}
    spans = spans_of(head, columns)
    own = dict(head.own)
    shared = _state_fields(head.shared)
    named = dict.fromkeys(
        [*optional_of(columns), *(name for o in own.values() for name in o.files)]
    )
    optional = {name: values_of(head, columns, name) for name in named}
    for n, part in enumerate(tokens_of(columns)):
        mask = columns["mask"][part] if "mask" in columns else None
        code = int(columns["finishes"][n]) if "finishes" in columns else NO_FINISH
        fields = shared | _state_fields(own[n]) if n in own else shared
        values = {name: found[n] for name, found in optional.items() if found[n] is not None}
        yield RolloutState(
            **own_copy(fields),
            **{name: values.pop(name) for name in COLUMNS if name in values},
            columns=values,
            index=int(columns["indices"][n]),
            prompt_ids=columns["prompt_ids"],
            response=head.responses[n],
            response_ids=columns["response_ids"][part],
            logprobs=columns["logprobs"][part],
            response_mask=None if mask is None or mask.all() else mask,
            spans=spans[n],
            reward=_reward(head.rewards, columns, n),
            finish_reason=None if code == NO_FINISH else head.finish_reasons[code],
            status=STATUSES[int(columns["statuses"][n])],
        )


def values_of(head: Head, columns: Columns, name: str) -> list[Any]:
    """Return an optional column of each rollout: its value, its address, or None."""
    found: list[Any] = [None] * len(head.responses)
    if parts_of(columns, name):
        found = known_column(name).split(columns, tokens_of(columns), len(columns["prompt_ids"]))
    for n, own in head.own:
        found[n] = own.files.get(name, found[n])
    return found


def spans_of(head: Head, columns: Columns) -> list[list[VersionSpan]]:
    found: list[list[VersionSpan]] = [[] for _ in head.responses]
    if "spans" in columns:
        for n, start, length, version, lineage in columns["spans"].tolist():
            found[n].append(VersionSpan(start, length, version, head.lineages[lineage]))
    return found


def _reward(names: Sequence[str], columns: Columns, n: int) -> dict[str, float] | None:
    if "rewards" not in columns:
        return None
    present = zip(names, columns["rewards"][n].tolist(), strict=True)
    return {name: value for name, value in present if value == value} or None


def _state_fields(texts: Shared | Own) -> dict[str, Any]:
    """Return the set fields as `RolloutState` takes them."""
    values = {name: getattr(texts, name) for name in texts.__struct_fields__}
    fields = {name: value for name, value in values.items() if value is not UNSET}
    fields.pop("files", None)  # see `values_of`
    if "sample" in fields:
        fields["sample_params"] = fields.pop("sample")
    return fields
