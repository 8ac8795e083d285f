"""Test the gateway with requests that agents sent when `make test-agents RECORD=1` ran them."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from rolloutmq.extensions.gateway.agents import AgentTask
from tests.extensions.real_agents.recording import recorded
from tests.extensions.real_agents.scripted import (
    AGENTS,
    QUESTION,
    ScriptedModel,
    chat_of,
    check_session,
)
from tests.producer_workers.recorder import loop_of, questions, run


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_requests_of_an_agent_are_recorded_token_by_token(name: str, tokenizer: Any) -> None:
    requests = recorded(name)

    async def solve(task: AgentTask) -> None:
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for request in requests:
                url = task.base_url.removesuffix("/v1") + request["path"]
                async with http.post(url, json=request["body"]) as reply:
                    said = await reply.read()
                assert reply.status == 200, said

    chat = chat_of(tokenizer)
    model = ScriptedModel(chat, AGENTS[name].turns)
    states = run(loop_of(chat, agent=solve), model, questions(QUESTION, max_tokens=200_000))
    check_session(AGENTS[name], model, states)
