"""Define an environment, which answers a model between its turns.

One named by a path runs in its own processes, unless its factory is marked `runs_inline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import convert, structs

from buffer.errors import UserCodeError
from buffer.imports import load_object
from buffer.wire.rollout import RolloutState, ToolCall
from producer_workers.user_code.border import ROLLOUT, Border, Rules, check_numbers
from producer_workers.user_code.process_function import call_of


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: its number from 0, its text, and the texts of all earlier turns."""

    number: int
    text: str
    earlier: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Messages for the model, or none to end the conversation.

    `reward` joins the judge's; `turn_reward` is of the turn that is answered.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    reward: dict[str, float] = field(default_factory=dict)
    turn_reward: float | None = None


class Environment(Protocol):
    """Answers the model between its turns: a set of tools, a game, a simulated user.

    It keeps no state, because another process or worker may ask next; changes to arguments are
    dropped.
    """

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        """Answer one turn. An exception fails the rollout."""
        ...


class EnvironmentBorder(Border):
    """Takes the rollout and its turn; calls the environment's `answer`."""

    def __init__(self) -> None:
        super().__init__(tuple[bytes, Turn])

    def prepare(self, function: Any, options: Mapping[str, Any]) -> Any:
        return function()

    def write(self, *arguments: Any) -> bytes:
        state, turn = arguments
        return super().write(ROLLOUT.write([state]), turn)

    def read(self, data: bytes) -> tuple[Any, ...]:
        rollout, turn = super().read(data)
        ((state,),) = ROLLOUT.read(rollout)
        return state, turn

    def call(self, function: Any, *arguments: Any) -> Any:
        return function.answer(*arguments)

    def check(self, name: str, result: Any, *arguments: Any) -> dict[str, Any]:
        messages = getattr(result, "messages", None)
        is_chat = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
        if not isinstance(result, Answer) or not is_chat:
            raise UserCodeError(
                f"environment {name!r} returned {result!r:.80}",
                hint="return an Answer with a list of messages",
            )
        if messages and messages[-1].get("role") == "assistant":
            raise UserCodeError(
                f"environment {name!r} returned messages that end with the assistant's",
                hint="end them with a message of the user or of a tool, or return none",
            )
        what = f"environment {name!r}"
        turn = result.turn_reward
        given = {} if turn is None else {"turn_reward": turn}
        return {
            "messages": messages,
            "calls": [structs.asdict(call) for call in result.calls],
            "reward": check_numbers(what, result.reward),
            **check_numbers(what, given),
        }

    def result(self, plain: Any) -> Answer:
        calls = [convert(call, ToolCall) for call in plain["calls"]]
        return Answer(plain["messages"], calls, plain["reward"], plain.get("turn_reward"))


ENVIRONMENT = EnvironmentBorder()


class ContainedEnvironment:
    """Asks a user's environment: an object, or "module:factory". `limit_s` limits one answer."""

    def __init__(
        self, environment: Environment | str, limit_s: float, *, processes: int, memory_mb: int
    ) -> None:
        named = isinstance(environment, str)
        name = environment if isinstance(environment, str) else type(environment).__name__
        rules = Rules(
            what=f"environment {name!r}",
            name=name,
            limit_s=limit_s,
            limit_key="agent_loop_options.answer_timeout_s",
            memory_mb=memory_mb,
            memory_key="agent_loop_options.memory_mb",
            processes=processes,
            mode="coroutines",
        )
        factory = load_object(name, kind="environment") if named else lambda: environment
        border = f"{__name__}:ENVIRONMENT"
        self._call = call_of(factory, border, rules, path=name if named else None)

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        """Return the answer. Raises UserCodeError."""
        answer: Answer = await self._call(state, turn)
        return answer

    async def close(self) -> None:
        self._call.close()
