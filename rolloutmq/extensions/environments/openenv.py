"""Play an episode of an environment of OpenEnv 0.10, which a server runs.

    reset ──observation──▶ model's turn ──action──▶ step ──observation, reward──▶ model's turn ─▶ …
                                                      └ done, or a limit: the rewards are added up

A problem's `extra` may have the arguments of `reset`. Whatever the environment raises fails the
rollout. An observation with `metadata = {"skip": "reason"}` skips the group.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson

from buffer.errors import ConfigError, RolloutMQError, ServiceAway
from buffer.imports import import_package, is_dotted_path, load_function
from producer_workers.http_client import AWAY
from producer_workers.user_code.border import raise_skip
from rolloutmq.extensions.environments.rows import NOTHING_ASKED
from rolloutmq.extensions.gateway.agents import AgentTask

REQUIREMENT = "openenv>=0.10,<0.11"

_ABOUT = ("done", "reward", "metadata")  # fields of an observation that the model does not read


class EpisodeBroken(RolloutMQError):
    """The environment has forgotten the episode."""


Messages = list[dict[str, Any]]


async def play(
    task: AgentTask,
    *,
    url: str,
    action: str = "message",
    observation: str = "",
    max_turns: int = 64,
    step_timeout_s: float = 120.0,
    turn_rewards: bool = False,
) -> dict[str, Any] | None:
    """Return the sum of the rewards as the score; None if the environment gave none.

    `url`: of the environment's server, each of whose answers `step_timeout_s` limits. `action`: the
    field of an action that is the model's text, or "module:function" that makes the action of the
    text and the last observation. `observation`: the field that the model reads, a text or chat
    messages, or "module:function" that makes these of an observation; "": all fields.
    `turn_rewards`: return them, too.
    """
    openai = import_package("openai", REQUIREMENT)
    act, read = _actions(action), _observations(observation)
    rewards: list[float | None] = []
    arguments = task.extra.get("reset") or {}
    known = task.finished[-1] if task.finished else []
    async with (
        openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, timeout=None) as model,
        _episode(url, arguments, step_timeout_s) as (environment, result),
    ):
        messages = _behind(task.messages, read(result.observation))
        while not result.done and len(rewards) < max_turns:
            _check_same(known, messages)
            said = next(iter(known[len(messages) :]), None) or await _ask(model, task, messages)
            if said is None:
                break
            if said.pop("is_cut", False):  # no action was completed
                rewards.append(None)
                break
            result = await _step(environment, act(said.get("content") or "", result.observation))
            rewards.append(result.reward)
            messages = _behind([*messages, said], read(result.observation))
    return _earned(rewards, is_over=result.done, by_turn=turn_rewards)


async def _ask(model: Any, task: AgentTask, messages: Messages) -> dict[str, Any] | None:
    """Return the model's message, with `is_cut` if it is not whole; None if it may say no more."""
    openai = import_package("openai", REQUIREMENT)
    try:
        reply = await model.chat.completions.create(model=task.model, messages=messages)
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return None
    (choice,) = reply.choices
    said: dict[str, Any] = choice.message.model_dump(exclude_none=True)
    return said | ({"is_cut": True} if choice.finish_reason == "length" else {})


def _check_same(known: Messages, messages: Messages) -> None:
    """Raise EpisodeBroken if the environment answers the actions of a resumed episode otherwise."""
    for before, now in zip(known, messages, strict=False):
        if any(before.get(key) != now.get(key) for key in ("role", "content")):
            raise EpisodeBroken(
                "the environment answers the same actions otherwise than before the interruption",
                hint="leave out agent_loop_options.resumable",
            )


def _earned(rewards: list[float | None], *, is_over: bool, by_turn: bool) -> dict[str, Any] | None:
    if is_over and all(reward is None for reward in rewards):
        return None
    numbers = [float(reward or 0.0) for reward in rewards]
    return {"score": sum(numbers), **({"turn_rewards": numbers} if by_turn else {})}


async def _step(environment: Any, action: dict[str, Any]) -> Any:
    """Return a step's result. Raises Skip; EpisodeBroken where the client has connected anew."""
    connection = environment._ws
    result = await environment.step(action)
    raise_skip(result.metadata)
    if environment._ws is not connection:  # the server has begun another episode for it
        raise EpisodeBroken("the connection to the environment broke in the middle of an episode")
    return result


@asynccontextmanager
async def _episode(
    url: str, arguments: Mapping[str, Any], timeout_s: float
) -> AsyncIterator[tuple[Any, Any]]:
    """Connect, and reset the environment. Raises ServiceAway, Skip."""
    core = import_package("openenv.core", REQUIREMENT)
    client = core.GenericEnvClient(base_url=url, message_timeout_s=timeout_s)
    try:
        await client.connect()
    except ConnectionError as error:
        cause = error.__cause__
        status = getattr(getattr(cause, "response", None), "status_code", None)
        is_cut = isinstance(getattr(cause, "__cause__", None), EOFError)  # it ends, or starts again
        if isinstance(cause, OSError) or is_cut or status in AWAY:
            raise ServiceAway(f"{url} is away: {cause}") from error
        raise
    async with client as environment:
        try:
            result = await environment.reset(**arguments)
        except RuntimeError as error:  # of the server, with its code
            if "CAPACITY_REACHED" in str(error):
                raise ServiceAway(f"{url} has no room for another episode") from error
            raise
        raise_skip(result.metadata)
        yield environment, result


def _actions(spec: str) -> Callable[[str, Any], dict[str, Any]]:
    if is_dotted_path(spec):
        return load_function(spec, kind="action")
    return lambda text, _observation: {spec: text}


def _observations(spec: str) -> Callable[[Any], str | Messages]:
    if is_dotted_path(spec):
        return load_function(spec, kind="observation")
    return partial(_read, spec)


def _read(field: str, observation: Mapping[str, Any]) -> str | Messages:
    """Return a field, or all that the model may read, as a text or chat messages."""
    fields = {name: value for name, value in observation.items() if name not in _ABOUT}
    if field and field not in fields:
        hint = f"name one of {', '.join(fields)}"
        raise ConfigError(f"the observation has no field {field!r}", hint=hint)
    found: Any = fields[field] if field else fields
    if not field and len(fields) == 1:
        (found,) = fields.values()
    is_chat = isinstance(found, list) and all(
        isinstance(each, dict) and {"role", "content"} <= each.keys() for each in found
    )
    return found if is_chat or isinstance(found, str) else orjson.dumps(found).decode()


def _behind(messages: Messages, observed: str | Messages) -> Messages:
    """Return the conversation with an observation behind it, joined to a question of the user."""
    if messages and messages[-1] == NOTHING_ASKED:
        messages = messages[:-1]
    if not isinstance(observed, str):
        return [*messages, *observed]
    if messages and messages[-1]["role"] == "user":
        asked = str(messages[-1]["content"])
        observed = "\n\n".join(filter(None, (asked, observed)))
        messages = messages[:-1]
    return [*messages, {"role": "user", "content": observed}]
