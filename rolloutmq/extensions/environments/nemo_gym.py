"""Run a row by an agent of NeMo Gym over HTTP, with the gateway as its model server.

    POST /run {row, _ng_rollout_id: key} ──▶ agent ──▶ gateway /ng-rollout/<key>/v1/responses
                                       ◀── {reward, mask_sample, ...}

Gym puts that path before its model's requests where `observability_enabled` or `token_id_capture`
is on for the agent.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from buffer.errors import RolloutMQError, ServiceAway, WireError
from buffer.wire.foreign_json import read_json
from producer_workers.http_client import AWAY, ask
from producer_workers.user_code.border import check_numbers, raise_skip
from rolloutmq.extensions.gateway.agents import AgentTask

LONGEST_ANSWER = 32 << 20  # bytes: it repeats the row, and has the whole conversation


class GymFailure(RolloutMQError):
    """The agent or its verifier failed, or gave no valid reward."""


async def play(task: AgentTask, *, url: str) -> dict[str, float]:
    """Return the reward of the row, with its components; `url`: of the agent's server.

    Raises GymFailure; ServiceAway if the server does not answer, or has no room.
    """
    row = {**task.extra["row"], "_ng_rollout_id": task.api_key}
    where = f"{url.rstrip('/')}/run"
    async with aiohttp.ClientSession(trust_env=True) as client:
        data = json.dumps(row).encode()
        # the loop limits the time of a run
        answer = await ask(client, "POST", where, data, limit_s=None, most=LONGEST_ANSWER)
    if answer.problem:
        kind = ServiceAway if answer.status in AWAY else GymFailure
        raise kind(f"{where} {answer.problem}")
    try:
        verified = read_json(answer.body, f"the answer of {where}", most=LONGEST_ANSWER)
    except WireError as error:
        raise GymFailure(error.message) from error
    if not isinstance(verified, dict):
        raise GymFailure(f"{where} gave {verified!r:.80}, not an object")
    return _reward(verified)


def _reward(verified: dict[str, Any]) -> dict[str, float]:
    raise_skip(verified)
    if verified.get("mask_sample"):
        why = [str(verified[n]) for n in ("failure_kind", "failure_reason") if verified.get(n)]
        raise GymFailure(f"the run is no measurement: {': '.join(why) or 'mask_sample'}")
    if verified.get("reward") is None:
        raise GymFailure(f"/run gave no reward, but {', '.join(verified)}")
    components = verified.get("reward_components") or {}
    if not isinstance(components, dict):
        raise GymFailure(f"/run gave {components!r:.80} as reward_components, not an object")
    return {**check_numbers("reward_components", components), "score": verified["reward"]}
