"""miles' samples as rollouts, and back: columns for tokens, JSON for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from miles.rollout.fully_async_data_buffer import DataBufferInput
from miles.utils.types import AdapterRef, RewardSpec, Sample

from buffer.errors import WireError
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan

TOKEN_FIELDS = ("rollout_log_probs", "loss_mask", "teacher_log_probs")

NAMED = {"adapter": AdapterRef, "reward_spec": RewardSpec}
"""Fields that are small objects of miles."""

LOST = ("multimodal_inputs", "multimodal_train_inputs", "rollout_indexer_topk")
"""Fields for which a run has no column."""


@dataclass(frozen=True)
class Versions:
    """What miles' weight versions are in the run: it counts from 1 again in each process."""

    first_step: int
    """step of the weights of version 1"""
    interval: int
    """steps between two updates of weights"""
    lineage: str

    def step(self, version: int) -> int:
        """Return the train step after which weights were made."""
        return self.first_step + (version - 1) * self.interval

    def since(self, first_step: int, version: str) -> str:
        """Return the number here of a version of a process that began at `first_step`."""
        return str(max(0, int(version) - (self.first_step - first_step) // self.interval))


def members(group: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each sample with its trajectory: "3", or "3/" where that is a list of samples."""
    for number, item in enumerate(group):
        if isinstance(item, list):
            yield from ((f"{number}/", sample) for sample in item)
        else:
            yield str(number), item


def taken_apart(
    group: Sequence[Any], reward_key: str | None, versions: Versions
) -> list[RolloutState]:
    """Return the rollouts of a group. Raises WireError for a field that has no column."""
    samples = [*members(group)]
    prompts = [each.tokens[: len(each.tokens) - each.response_length] for _, each in samples]
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    shared = sum(1 for _ in alike)
    states = []
    for index, (session, sample) in enumerate(samples):
        state = _rollout(sample, shared, versions)
        state.index, state.session_id = index, session
        if (reward := sample.reward) is not None:
            state.reward = {"score": float(reward[reward_key] if reward_key else reward)}
        states.append(state)
    return states


def _rollout(sample: Any, prompt: int, versions: Versions) -> RolloutState:
    """Return a sample whose first `prompt` tokens are those of its group's prompt.

    Further tokens of its prompt are response tokens that are not trained.
    """
    fields = sample.to_dict()
    if lost := [name for name in LOST if fields.pop(name) is not None]:
        raise WireError(
            f"sample {sample.index} has {', '.join(lost)}, which a run cannot keep",
            hint="use miles' own buffer for this model",
        )
    tokens, experts = fields.pop("tokens"), fields.pop("rollout_routed_experts")
    given = {name: fields.pop(name) for name in TOKEN_FIELDS}
    fields |= {name: fields[name] and asdict(fields[name]) for name in NAMED}
    fields |= {"first_step": versions.first_step, "label": None}
    fields["given"] = [name for name, values in given.items() if values is not None]
    length = len(tokens) - prompt
    before = length - sample.response_length

    def column(name: str, missing: float) -> list[float]:
        values = [missing] * sample.response_length if given[name] is None else given[name]
        return [0] * before + list(values)

    teacher = given["teacher_log_probs"] is not None
    oldest = sample.oldest_weight_version
    spans = []
    if oldest is not None and length:
        spans = [VersionSpan(0, length, versions.step(oldest), versions.lineage)]
    return RolloutState(
        prompt_ids=tokens[:prompt],
        response=fields.pop("response"),
        response_ids=tokens[prompt:],
        logprobs=column("rollout_log_probs", 0.0),
        response_mask=column("loss_mask", 1),
        teacher_logprobs={"teacher": column("teacher_log_probs", 0.0)} if teacher else None,
        routed_experts=experts,
        spans=spans,
        finish_reason="length" if sample.status is Sample.Status.TRUNCATED else "stop",
        status=Status.COMPLETED,
        ground_truth=sample.label,
        extra=fields,
    )


def put_together(group: RolloutGroup, versions: Versions) -> Any:
    """Return a group with its prompts, as miles' own objects."""
    trajectories: dict[str, list[Any]] = {}
    for state in group.states:
        trajectories.setdefault(str(state.session_id), []).append(_sample(state, versions))
    prompts = [deepcopy(samples[0]) for samples in trajectories.values()]
    for prompt in prompts:
        prompt.reset_for_retry()
    items = [
        samples if session.endswith("/") else samples[0]
        for session, samples in trajectories.items()
    ]
    return DataBufferInput(prompt_group=prompts, group=items)


def _sample(state: RolloutState, versions: Versions) -> Any:
    fields = dict(state.extra)
    first_step = fields.pop("first_step")
    assert state.prompt_ids is not None
    mask = state.response_mask  # None: all ones
    columns: dict[str, Any] = {
        "rollout_log_probs": state.logprobs,
        "loss_mask": np.ones(len(state.response_ids), int) if mask is None else mask,
        "teacher_log_probs": (state.teacher_logprobs or {}).get("teacher"),
    }
    start = len(state.response_ids) - fields["response_length"]
    fields |= {name: columns[name][start:].tolist() for name in fields.pop("given")}
    fields |= {name: fields[name] and kind(**fields[name]) for name, kind in NAMED.items()}
    experts = state.routed_experts
    fields |= {
        "tokens": np.concatenate([state.prompt_ids, state.response_ids]).tolist(),
        "response": state.response,
        "label": state.ground_truth,
        "rollout_routed_experts": None if experts is None else np.asarray(experts, np.int32),
        "weight_versions": [versions.since(first_step, each) for each in fields["weight_versions"]],
    }
    return Sample.from_dict(fields)


def group_index(group: RolloutGroup) -> int | None:
    """Return the number of the prompt's draw in miles' data source."""
    index: int | None = group.states[0].extra["group_index"]
    return index
