"""Start an agent: a Python function in its own processes, or a program.

    agent = "my_agent:solve"            # async def solve(task: AgentTask) -> reward or None;
                                        # a plain function runs in a thread
    command = ["python", "agent.py"]    # with OPENAI_BASE_URL, ANTHROPIC_BASE_URL and their keys,
                                        # and its task as JSON on stdin; exit code 0 or the rollout
                                        # fails
    solve.resumable = True              # it continues from task.finished; for programs:
                                        # agent_loop_options resumable = true

A program is ended together with everything that it started.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import orjson

from buffer.errors import ConfigError, ServiceAway, UserCodeError
from buffer.failure_text import trace_text
from buffer.imports import load_object
from buffer.redis.retry import Backoff
from producer_workers.follow_owner import kill_session
from producer_workers.user_code.border import Border, Rules, check_answer
from producer_workers.user_code.process_function import call_of
from producer_workers.work_time import timeout

log = logging.getLogger("rolloutmq.worker")

_THREADS = 256  # plain functions that run at the same time in a worker itself; more wait

GRACE_S = 10.0  # the endpoint refuses the next request of a cancelled agent, which ends in order

AWAY = Backoff(1.0, 5.0)  # pauses before a server of environments that is away is asked again
QUIET_S = 60.0  # between two lines of the log about that

MODEL = "policy"  # the model's name; the endpoint accepts any other name, too


class AgentError(UserCodeError):
    """The agent raised, exited with a code other than 0, or took too long.

    `earned`: its reward if a session has ended at a limit, which may be the cause; None: unknown.
    """

    earned: Mapping[str, float] | None = MappingProxyType({"score": 0.0})


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The address and key of a session, for clients of OpenAI's and Anthropic's APIs, and its task.

    `base_url` is OpenAI's.
    """

    base_url: str
    api_key: str
    messages: list[dict[str, Any]]
    data_source: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    ground_truth: Any = None  # for functions that compute their own reward; programs do not get it
    model: str = MODEL
    session_id: str = ""  # the same when the session is continued
    # For a resumable agent: the conversations of its session so far, with the model's answers; the
    # one continued last is at the end. Those of other sessions, by name.
    finished: list[list[dict[str, Any]]] = field(default_factory=list)
    finished_roles: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)

    def role(self, name: str, number: int = 0) -> AgentTask:
        """Return this task with the key of another session, in which the model plays a role.

        Its rollouts have this `role`: their rewards are compared with those of the role in the
        group. `number` tells several sessions of a role apart.
        """
        if number:
            name = f"{name}/{number}"
        return replace(
            self,
            api_key=f"{self.api_key}:{name}",
            session_id=f"{self.session_id}/{name}",
            finished=self.finished_roles.get(name, []),
            finished_roles={},
        )

    @property
    def anthropic_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables in which programs find the address and the key."""
        urls = {"OPENAI": self.base_url, "ANTHROPIC": self.anthropic_url}
        addresses = {f"{vendor}_BASE_URL": url for vendor, url in urls.items()}
        return addresses | {f"{vendor}_API_KEY": self.api_key for vendor in urls}

    @property
    def question(self) -> str:
        return question_of(self.messages)


def question_of(messages: Sequence[dict[str, Any]]) -> str:
    """Return the last message of a user, "" without one."""
    asked = [str(m["content"]) for m in messages if m.get("role") == "user"]
    return asked[-1] if asked else ""


Earned = dict[str, dict[str, Any]]
"""The rewards of an agent by role (or session), perhaps with `turn_rewards` and another `role`.

Sessions with {} are left out of the group.
"""

Begin = Callable[[], AgentTask]
"""Returns the task of an agent that starts; again, if it must start again because others failed."""

EVERY_ROLE = "*"

BY_HEADER = "*"  # as a role in a key: each X-Session-ID of the requests has a session of its own


@runtime_checkable
class Agent(Protocol):
    """What plays the sessions of a task."""

    resumable: bool

    async def run(self, begin: Begin) -> Earned | None:
        """Return the agent's own rewards, or None. Raises AgentError; cancelling ends the agent."""
        ...

    def close(self) -> None: ...


class AgentBorder(Border):
    """Takes the task; returns rewards by role, or None."""

    def __init__(self) -> None:
        super().__init__(tuple[AgentTask])

    def check(self, name: str, result: Any, *arguments: Any) -> Earned | None:
        if result is None:
            return None
        parts = result.values() if isinstance(result, Mapping) else ()
        kinds = {isinstance(part, Mapping) for part in parts if part is not None}
        by_role = result if kinds == {True} else {EVERY_ROLE: result}
        return {str(role): self._reward(name, reward) for role, reward in by_role.items()}

    def _reward(self, name: str, reward: Any) -> dict[str, Any]:
        if reward is None:
            return {}
        if not isinstance(reward, Mapping) or not isinstance(reward.get("role"), str):
            return check_answer(name, reward, has_columns=False)
        numbers = {key: value for key, value in reward.items() if key != "role"}
        return check_answer(name, numbers, has_columns=False) | {"role": reward["role"]}


AGENT = AgentBorder()


class FunctionAgent:
    """Runs a function, in processes if it is named as "module:function". Raises ConfigError.

    A plain function runs in a thread. `limit_s` limits one session. `options`: its keyword
    arguments. `error`: what it raises for any fault of the function.
    """

    def __init__(
        self,
        agent: str | Callable[..., Any],
        limit_s: float,
        options: Mapping[str, Any] | None = None,
        error: type[AgentError] = AgentError,
    ) -> None:
        path = agent if isinstance(agent, str) else None
        function: Any = load_object(path, kind="agent") if path else agent
        if not callable(function):
            raise ConfigError(f"agent {agent!r} is not a function", hint='give "module:function"')
        name = path or str(getattr(function, "__name__", "agent"))
        self.resumable = bool(getattr(function, "resumable", False))
        is_coroutine = inspect.iscoroutinefunction(function)
        rules = Rules(
            what=f"agent {name}",
            name=name,
            limit_s=limit_s,
            limit_key="agent_loop_options.time_limit_s",
            error=error,  # it fails its rollout alone
            processes=4 if is_coroutine else 16,
            mode="coroutines" if is_coroutine else "threads",
            grace_s=GRACE_S,
        )
        self._quiet_until_s = 0.0
        self._call = call_of(
            function, f"{__name__}:AGENT", rules, path=path, options=options, turns=_THREADS
        )

    async def run(self, begin: Begin) -> Earned | None:
        attempt = 0
        while True:
            try:
                earned: Earned | None = await self._call(begin(), again=lambda: (begin(),))
                return earned
            except ServiceAway as error:  # without a limit: no rollout is to blame
                if time.monotonic() >= self._quiet_until_s:
                    self._quiet_until_s = time.monotonic() + QUIET_S
                    log.warning("%s; rollouts wait, attempt %d", error, attempt + 1)
            await asyncio.sleep(AWAY.pause_s(attempt))
            attempt += 1

    def close(self) -> None:
        self._call.close()


class ProgramAgent:
    """Runs a program, with `{question}`, `{base_url}` and `{model}` in its arguments replaced.

    Raises ConfigError for `{api_key}`: every user of the machine can read a program's arguments.
    """

    resumable = False

    def __init__(self, command: Sequence[str], limit_s: float) -> None:
        self._command = [str(part) for part in command]
        if any("{api_key}" in part for part in self._command):
            raise ConfigError(
                "the agent's command would show {api_key} to every user of this machine",
                hint="leave it out: the program finds the key in its environment, OPENAI_API_KEY",
            )
        self._limit_s = limit_s

    def close(self) -> None: ...  # each program ends with its session

    async def run(self, begin: Begin) -> Earned | None:
        task, command = begin(), self._command
        for name in ("question", "base_url", "model"):
            command = [part.replace(f"{{{name}}}", getattr(task, name)) for part in command]
        names = ("messages", "data_source", "extra", "session_id", "finished", "finished_roles")
        given = {name: getattr(task, name) for name in names}
        process = await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | task.variables,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with timeout(self._limit_s):
                stderr = await _talk(process, orjson.dumps(given, default=str))
        except TimeoutError as error:
            message = f"agent {self._command[0]} took longer than {self._limit_s:g} s"
            raise AgentError(message, hint="see agent_loop_options.time_limit_s") from error
        finally:
            await end_process(process)
        if process.returncode:
            said = stderr.decode(errors="replace").strip().split("\n")
            message = f"agent {self._command[0]} exited with {process.returncode}: {said[-1]}"
            raise AgentError(message, trace=trace_text(said))
        return None


async def _talk(process: asyncio.subprocess.Process, given: bytes) -> bytes:
    """Write to a program's stdin; return the last of its stderr, once it has ended."""
    stdin, stderr = process.stdin, process.stderr
    assert stdin
    assert stderr

    async def write() -> None:
        with suppress(ConnectionError):  # it need not read its task
            stdin.write(given)
            await stdin.drain()
        stdin.close()

    last = b""
    async with asyncio.TaskGroup() as talk:
        talk.create_task(write())
        while chunk := await stderr.read(1 << 16):
            last = (last + chunk)[-2000:]
    await process.wait()
    return last


async def end_process(process: asyncio.subprocess.Process) -> None:
    """End the program and all processes of its session, which might outlive it."""
    kill_session(process.pid)
    await asyncio.shield(process.wait())
