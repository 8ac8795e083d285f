"""Self-play: the model writes sums, and learns to answer its own.

    [tasks.sums]
    agent_loop = "gateway"
    agent_loop_options = { agent = "examples.self_play:play" }
    judge = "environment"
    # train_roles = ["solver"]    # leaves the proposer as it is

A rollout is one sum and its answers. The answers are compared with those to the group's other sums,
the sums with each other. A sum is worth most if half of its answers are right (the learnability of
Absolute Zero, Zhao et al. 2025, arXiv:2505.03335).
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from openai import AsyncOpenAI

ANSWERS = 4  # to each sum


async def play(task: Any) -> dict[str, Any]:
    """Return the rewards by role: of the proposer, and of each solver."""
    said = await ask(task.role("proposer"), task.question)
    found = re.search(r"(\d{1,6}) *\+ *(\d{1,6})", said)
    if not found:
        return {"proposer": {"score": -1.0}}
    first, second = found.groups()
    question = f"What is {first} + {second}? Give the number alone."
    solvers = [task.role("solver", n) for n in range(1, ANSWERS + 1)]
    answers = await asyncio.gather(*(ask(solver, question) for solver in solvers))
    total = str(int(first) + int(second))
    right = [re.findall(r"\d+", answer)[-1:] == [total] for answer in answers]
    share = sum(right) / ANSWERS
    rewards: dict[str, Any] = {"proposer": {"score": min(share, 1 - share) * 2, "solved": share}}
    for n, is_right in enumerate(right, 1):
        rewards[f"solver/{n}"] = {"score": float(is_right)}
    return rewards


async def ask(role: Any, question: str) -> str:
    """Return the model's answer, in the session of a role."""
    async with AsyncOpenAI(base_url=role.base_url, api_key=role.api_key) as client:
        messages: Any = [{"role": "user", "content": question}]
        reply = await client.chat.completions.create(model=role.model, messages=messages)
    return reply.choices[0].message.content or ""
