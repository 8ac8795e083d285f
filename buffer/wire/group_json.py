"""A group as JSON, for `show --json`, the sample log and the browser view."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict

from buffer.wire.columns import all_columns
from buffer.wire.document import plain_structure
from buffer.wire.group import FEEDBACK, RolloutGroup
from buffer.wire.rollout import RolloutState


def group_json(group: RolloutGroup, tokens: bool) -> dict[str, Any]:
    """Return a group as `show --json` prints it; `tokens` adds ids, logprobs, masks, columns."""
    shared: dict[str, Any] = to_builtins(group.shared, enc_hook=plain_structure)
    shared.pop("sample", None)
    if tokens:
        shared["prompt_ids"] = group.prompt_ids.tolist()
    members = [_member_json(rollout, tokens) for rollout in group.states]
    for member, rollout in zip(members, group.states, strict=True):
        if rollout.messages != group.shared.messages:
            member["messages"] = rollout.messages
    return shared | {"members": members}


def _member_json(rollout: RolloutState, tokens: bool) -> dict[str, Any]:
    member = {
        "index": rollout.index,
        "status": rollout.status,
        "response": rollout.response,
        "tokens": len(rollout.response_ids),
        "reward": rollout.reward,
        "finish_reason": rollout.finish_reason,
        "error": rollout.error,
        "feedback": rollout.extra.get(FEEDBACK),
        "session_id": rollout.session_id,
        "role": rollout.role,
        "tool_calls": [asdict(call) for call in rollout.tool_calls],
        "spans": [span._asdict() for span in rollout.spans],
        "sample_params": to_builtins(asdict(rollout.sample_params), enc_hook=plain_structure),
    }
    if tokens:
        member |= {
            "response_ids": rollout.response_ids.tolist(),
            "logprobs": rollout.logprobs.tolist(),
        }
        member["response_mask"] = (
            None if rollout.response_mask is None else rollout.response_mask.tolist()
        )
        columns = {
            column.name: column.plain(column.get(rollout))
            for column in all_columns()
            if not column.is_large
        }
        member["columns"] = {name: value for name, value in columns.items() if value is not None}
    return member
