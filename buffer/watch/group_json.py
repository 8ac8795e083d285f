"""A group for programs: what `show --json` and the browser are told."""

from __future__ import annotations

from typing import Any

from buffer.group import RolloutGroup
from buffer.rollout import RolloutState


def group_json(group: RolloutGroup, states: list[RolloutState], tokens: bool) -> dict[str, Any]:
    """What was asked, and each of `states`. `tokens`: with ids, logprobs and masks."""
    shared = dict(group.shared)
    if tokens:
        shared["prompt_ids"] = group.prompt_ids.tolist()
    return shared | {"members": [_member_json(rollout, tokens) for rollout in states]}


def _member_json(rollout: RolloutState, tokens: bool) -> dict[str, Any]:
    facts_ = {
        "index": rollout.index,
        "status": rollout.status,
        "response": rollout.response,
        "tokens": len(rollout.response_ids),
        "reward": rollout.reward,
        "finish_reason": rollout.finish_reason,
        "error": rollout.error,
        "session_id": rollout.session_id,
        "tool_calls": [call.model_dump() for call in rollout.tool_calls],
        "spans": [span._asdict() for span in rollout.spans],
        "sample_params": rollout.sample_params.model_dump(),
    }
    if tokens:
        facts_ |= {"response_ids": rollout.response_ids.tolist(), "logprobs": rollout.logprobs.tolist()}
        facts_["response_mask"] = None if rollout.response_mask is None else rollout.response_mask.tolist()
    return facts_
