"""verl's `RolloutSample` as rollouts of a group, and back.

Ids, masks, logprobs, rewards and versions are columns of the group. Everything else is in `extra`,
with the tensors that the columns do not give back bit by bit; padding is not stored. Tensors come
back on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from buffer.errors import WireError
from buffer.wire.rollout import RolloutState, Status, VersionSpan, no_tokens
from rolloutmq.integrations import plain_values

KEY = "verl"
"""In `extra`: all of a sample that has no field of a rollout, as `plain_values` encodes it."""


def states_of(sample: Any, sync: int, lineage: str) -> list[RolloutState]:
    """Return the rollouts of a sample; verl counts its weights in `sync` steps.

    Raises WireError, with its name, for a field that is missing or cannot be encoded.
    """
    data = sample.full_batch
    # the tokens of an answer can be of several weights, of which verl keeps the first and the last
    weights = _column(data.non_tensor_batch, "min_global_steps").tolist()
    if None in weights:
        raise WireError("RolloutSample.full_batch: min_global_steps has None: the engine sets none")
    prompts, answers, attention, trained, logprobs = (
        _column(data.batch, name).cpu().numpy()
        for name in ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs")
    )
    scores = data.batch["rm_scores"].sum(1).tolist() if "rm_scores" in data.batch else None
    width = prompts.shape[1]
    is_read = attention.astype(bool)
    # a group has one prompt; rows with another one are stored as tensors, too
    prompt = prompts[0][is_read[0, :width]]
    states = []
    for n, row in enumerate(answers):
        length = int(is_read[n, width:].sum())
        states.append(
            RolloutState(
                index=n,
                status=Status.COMPLETED,
                prompt_ids=prompt,
                response_ids=row[:length],
                response_mask=trained[n, :length],
                logprobs=logprobs[n, :length],
                spans=[VersionSpan(0, length, sync * weights[n], lineage)] if length else [],
                reward={"score": scores[n]} if scores else None,
                finish_reason="length" if length == len(row) else "stop",
            )
        )
    is_padding = ~is_read[:, :width]
    shape = [width, answers.shape[1], int(prompts[is_padding][0]) if is_padding.any() else 0]
    rebuilt = _tensors(states, *shape)
    rest = {
        "shape": shape,
        "epoch": sample.epoch,
        "batch": {
            name: None if name in rebuilt and _same(tensor, rebuilt[name]) else tensor
            for name, tensor in data.batch.items()
        },
        "non_tensor_batch": data.non_tensor_batch,
        "meta_info": data.meta_info,
        "rollout_status": sample.rollout_status,
    }
    encoded = plain_values.encode(rest, "RolloutSample")
    for state in states:
        state.extra = {"sample_id": sample.sample_id, KEY: encoded}
    return states


def sample_of(states: Sequence[RolloutState]) -> Any:
    """Return the sample that `states_of` took apart. Raises WireError."""
    from tensordict import TensorDict
    from verl import DataProto
    from verl.experimental.fully_async_policy.detach_utils import RolloutSample

    rest = plain_values.decode(states[0].extra[KEY])
    rebuilt = _tensors(states, *rest["shape"])
    batch = {
        name: rebuilt[name] if tensor is None else tensor for name, tensor in rest["batch"].items()
    }
    data = DataProto(
        TensorDict(batch, batch_size=len(states)), rest["non_tensor_batch"], rest["meta_info"]
    )
    sample_id = states[0].extra["sample_id"]
    return RolloutSample(data, sample_id, rest["epoch"], rest["rollout_status"])


def _column(batch: Any, name: str) -> Any:
    if batch is None or name not in batch:
        raise WireError(
            f"RolloutSample.full_batch has no {name}",
            hint="set actor_rollout_ref.rollout.calculate_log_probs=True, as the fully-async "
            "trainer needs it",
        )
    return batch[name]


def _tensors(states: Sequence[RolloutState], width: int, longest: int, pad: int) -> dict[str, Any]:
    """Return the tensors of verl's batch that follow from the columns, padded as verl does."""
    import torch

    count = len(states)
    prompt = no_tokens() if states[0].prompt_ids is None else states[0].prompt_ids
    start = width - len(prompt)
    prompts = np.full((count, width), pad, "<i8")
    answers = np.full((count, longest), pad, "<i8")
    attention = np.zeros((count, width + longest), "<i8")
    trained = np.zeros((count, longest), "<i8")
    logprobs, scores = np.zeros((2, count, longest), "<f4")
    for n, state in enumerate(states):
        end = len(state.response_ids)
        prompts[n, start:] = prompt
        answers[n, :end] = state.response_ids
        attention[n, start : width + end] = 1
        trained[n, :end] = 1 if state.response_mask is None else state.response_mask
        logprobs[n, :end] = state.logprobs
        scores[n, end - 1] = (state.reward or {}).get("score", 0.0)
    arrays = {
        "prompts": prompts,
        "responses": answers,
        "input_ids": np.concatenate([prompts, answers], 1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(1) - 1, 0),
        "response_mask": trained,
        "rollout_log_probs": logprobs,
        "rm_scores": scores,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _same(tensor: Any, rebuilt: Any) -> bool:
    return tensor.dtype == rebuilt.dtype and bool(tensor.equal(rebuilt))
