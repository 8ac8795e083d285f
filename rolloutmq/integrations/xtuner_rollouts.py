"""Take XTuner's `RolloutState`s apart into rollouts of ours, and put them together again.

What both have is in the same columns, so that `rolloutmq show`, queries and exports read it: texts,
token ids, logprobs, masks, versions, score. Everything else is an entry of `extra`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from xtuner.v1.data_proto.rl_data import RolloutState as XTunerState

from buffer.wire.rollout import OF_RESPONSE, RolloutState, Status, VersionSpan
from rolloutmq.integrations import plain_values
from rolloutmq.integrations.objects import Kinds, apart, models_of, together

OURS = {
    "message": "messages",
    "prompt_ids": "prompt_ids",
    "response": "response",
    "response_ids": "response_ids",
    "response_model_steps": "spans",
    "logprobs": "logprobs",
    "response_mask": "response_mask",
    "finish_reason": "finish_reason",
}
"""Fields of XTuner's, each with the one of ours that replaces it where both hold the same."""

LONGEST = 2**17
"""Prompts with more tokens or characters, as with images in the text, are in `extra` alone."""


def taken_apart(group: list[XTunerState], record: dict[str, Any]) -> list[RolloutState]:
    """Return the rollouts of a group; `record` is kept with the first. Raises WireError."""
    prompt = group[0].prompt_ids
    if any(state.prompt_ids != prompt for state in group) or len(prompt or ()) > LONGEST:
        prompt = None  # a group of ours has one prompt
    arrays: dict[bytes, NDArray[Any]] = {}
    kinds = _kinds(lambda array: _number(arrays, array))
    status = Status.COMPLETED if record["status"] == "completed" else Status.ABORTED
    states, rest = [], []
    for n, state in enumerate(group):
        ours = _ours(state, prompt)
        ours.index, ours.status = n, status
        fields = {name: value for name, value in state if value is not None}
        same = [name for name in OURS if fields.get(name) and _theirs(ours, name) == fields[name]]
        for name in same:
            del fields[name]
        rest.append((same, apart(fields, kinds)))
        states.append(ours)
    kept = plain_values.encode((rest, list(arrays.values())), "RolloutState")
    states[0].extra = {OF_RESPONSE: {"record": record, "rollouts": kept}}
    return states


def _number(arrays: dict[bytes, NDArray[Any]], array: NDArray[Any]) -> int:
    # the rollouts of a prompt share their pixels
    key = array.tobytes() + repr((array.dtype, array.shape)).encode()
    arrays.setdefault(key, array)
    return list(arrays).index(key)


def _kinds(
    number: Callable[[NDArray[Any]], int] = id, arrays: Sequence[NDArray[Any]] = ()
) -> Kinds:
    return {
        **models_of("xtuner"),
        "ray": (ray.ObjectRef, ray.get, ray.put),
        "array": (np.ndarray, number, arrays.__getitem__),
    }


def put_together(states: list[RolloutState]) -> tuple[list[XTunerState], dict[str, Any]]:
    """Return the rollouts that `taken_apart` was given, and their record. Raises WireError."""
    kept = states[0].extra[OF_RESPONSE]
    rest, arrays = plain_values.decode(kept["rollouts"])
    kinds = _kinds(arrays=arrays)
    group = []
    for ours, (same, fields) in zip(states, rest, strict=True):
        columns = {name: _theirs(ours, name) for name in same}
        group.append(XTunerState(**together(fields, kinds), **columns))
    return group, kept["record"]


def _ours(state: XTunerState, prompt: list[int] | None) -> RolloutState:
    ids, steps = state.response_ids or [], state.response_model_steps or []
    columns = {name: getattr(state, name) or [] for name in ("logprobs", "response_mask")}
    # a segment of an agent has those of its whole sequence
    fitting = {name: column for name, column in columns.items() if len(column) == len(ids) > 0}
    score = (state.reward or {}).get("score")
    messages = apart(state.message, _kinds())
    return RolloutState(
        messages=messages if len(repr(messages)) <= LONGEST else [],
        prompt_ids=prompt,
        response=state.response or "",
        response_ids=ids,
        spans=_spans(steps) if len(steps) == len(ids) else [],
        finish_reason=state.finish_reason,
        error=state.error_msg,
        reward={"score": score} if isinstance(score, int | float) and score == score else None,
        **{"logprobs": np.zeros(len(ids), "<f4"), **fitting},
    )


def _spans(steps: list[int]) -> list[VersionSpan]:
    starts = np.flatnonzero(np.diff(steps, prepend=-1)).tolist()
    ends = [*starts[1:], len(steps)] if steps else []
    return [VersionSpan(a, b - a, steps[a], "xtuner") for a, b in zip(starts, ends, strict=True)]


def _theirs(ours: RolloutState, name: str) -> Any:
    value = getattr(ours, OURS[name])
    if name == "response_model_steps":
        return [span.version for span in value for _ in range(span.length)]
    return value.tolist() if isinstance(value, np.ndarray) else value
