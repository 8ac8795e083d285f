"""Use environments of early `verifiers` 0.1 (MultiTurnEnv) in the loop "multi_turn".

    # make() -> VerifiersEnvironment(vf.load_environment("wordle"))
    environment = "my_env:make"

For 0.1.14 to 0.4 see gateway/verifiers_agent.py. It keeps nothing between two turns but plays the
earlier ones again, so the environment must answer the same text the same way. The rubric scores
every turn; the last score counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.environment import Answer, Turn
from producer_workers.user_code.rollout_border import check_reward


class VerifiersEnvironment:
    """Wraps an environment of verifiers. With judge = "environment" its rubric gives the reward."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        play = _Play(self._environment, state)
        for text in turn.earlier:
            play.add_turn(text)
            await play.respond()
        play.add_turn(turn.text)
        is_over = await play.is_over()
        messages = [] if is_over else await play.respond()
        return Answer(messages, reward=await play.score())


class _Play:
    def __init__(self, environment: Any, state: RolloutState) -> None:
        self._environment = environment
        self._prompt = [dict(message) for message in state.messages]
        self._completion: list[dict[str, Any]] = []
        self._state: dict[str, Any] = {
            "prompt": self._prompt,
            "completion": self._completion,
            "answer": state.ground_truth,
            "info": state.extra,
            "task": state.data_source or "default",
            "turn": 0,
            "responses": [],
        }

    def add_turn(self, text: str) -> None:
        self._completion.append({"role": "assistant", "content": text})
        self._state["turn"] += 1

    async def is_over(self) -> bool:
        messages = [*self._prompt, *self._completion]
        return bool(await _settle(self._environment.is_completed(messages, self._state)))

    async def respond(self) -> list[dict[str, Any]]:
        messages = [*self._prompt, *self._completion]
        result = await _settle(self._environment.env_response(messages, self._state))
        if isinstance(result, tuple):
            result, self._state = result
        if isinstance(result, str):
            result = [{"role": "user", "content": result}]
        answer = [dict(message) for message in result]
        self._completion += answer
        return answer

    async def score(self) -> dict[str, float]:
        rubric = self._environment.rubric
        functions = rubric.get_reward_funcs()
        weights = rubric.get_reward_weights()
        values = {function.__name__: float(await self._ask(function)) for function in functions}
        total = sum(weight * value for weight, value in zip(weights, values.values(), strict=True))
        return check_reward("rubric", {**values, "score": total})

    async def _ask(self, function: Callable[..., Any]) -> Any:
        """Call a reward function with the known values that its parameters name."""
        names = ("prompt", "completion", "answer", "info", "task")
        known = {name: self._state[name] for name in names}
        known["state"] = self._state
        known["parser"] = getattr(self._environment, "parser", None)
        parameters = inspect.signature(function).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            known = {name: value for name, value in known.items() if name in parameters}
        return await _settle(function(**known))


async def _settle(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
