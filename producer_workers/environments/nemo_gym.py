"""Run a row by an agent of NeMo Gym over HTTP, with the gateway as its model server.

    POST /run {row, _ng_rollout_id: key} ──▶ agent ──▶ gateway /ng-rollout/<key>/v1/responses
                                       ◀── {reward, mask_sample, ...}

Gym puts that path before its model's requests where `observability_enabled` or `token_id_capture`
is on for the agent.
"""

from __future__ import annotations

from typing import Any

import aiohttp

from buffer.errors import RolloutMQError, ServiceAway
from producer_workers.gateway.agents import AgentTask
from producer_workers.user_code.border import check_numbers
from producer_workers.user_code.http_request import AWAY

RUN_ID = "_ng_rollout_id"

LONGEST_ANSWER = 2000  # characters of a failed answer that are kept


class GymFailure(RolloutMQError):
    """The agent or its verifier failed, or gave no valid reward."""


async def play(task: AgentTask, *, url: str) -> dict[str, float]:
    """Return the reward of the row, with its components; `url`: of the agent's server.

    Raises GymFailure; ServiceAway if the server does not answer, or has no room.
    """
    row = {**task.extra["row"], RUN_ID: task.api_key}
    timeout = aiohttp.ClientTimeout(total=None)  # the loop limits the run
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as client,
            client.post(f"{url.rstrip('/')}/run", json=row) as response,
        ):
            if not response.ok:
                said = (await response.text())[:LONGEST_ANSWER]
                kind = ServiceAway if response.status in AWAY else GymFailure
                raise kind(f"{url}/run answered {response.status}: {said}")
            verified = await response.json()
    except aiohttp.ClientConnectorError as error:
        raise ServiceAway(f"{url} is away: {error}") from error
    return _reward(verified)


def _reward(verified: dict[str, Any]) -> dict[str, float]:
    if verified.get("mask_sample"):
        why = [str(verified[n]) for n in ("failure_kind", "failure_reason") if verified.get(n)]
        raise GymFailure(f"the run is no measurement: {': '.join(why) or 'mask_sample'}")
    if verified.get("reward") is None:
        raise GymFailure(f"/run gave no reward, but {', '.join(verified)}")
    components = verified.get("reward_components") or {}
    if not isinstance(components, dict):
        raise GymFailure(f"/run gave {components!r:.80} as reward_components, not an object")
    return {**check_numbers("reward_components", components), "score": verified["reward"]}
