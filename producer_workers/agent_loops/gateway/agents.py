"""Start an agent: a Python function in this process, or a program.

    agent = "my_agent:solve"            # async def solve(task: AgentTask) -> reward or None;
                                        # a plain function runs in a thread
    command = ["python", "agent.py"]    # OPENAI_BASE_URL and OPENAI_API_KEY in its environment,
                                        # its task as JSON on stdin
    solve.resumable = True              # it begins from task.finished; or agent_loop_options
                                        # resumable = true, for programs, too

A program is ended together with all that it started. An exit code other than 0 fails the rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import orjson

from buffer.errors import ConfigError, RolloutMQError
from producer_workers.user_code.checked_result import check_reward
from producer_workers.user_code.user_function import USER_ERRORS, attempt, describe

_THREADS = 256
"""Plain functions that run at the same time; more wait."""

MODEL = "policy"
"""The name of the model; the endpoint accepts any other name, too."""

LONGEST_STDERR = 2000
"""Characters of a failed program's stderr that are kept."""


class AgentError(RolloutMQError):
    """The agent raised, exited with a code other than 0, or took too long."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent gets.

    Usage:
        client = OpenAI(base_url=task.base_url, api_key=task.api_key)
        client.chat.completions.create(model=task.model, messages=task.messages)
    """

    base_url: str
    api_key: str
    messages: list[dict[str, Any]]
    data_source: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    ground_truth: Any = None
    """For functions that compute their own reward; programs do not get it."""
    model: str = MODEL
    session_id: str = ""
    """The same whenever the session is continued."""
    finished: list[list[dict[str, Any]]] = field(default_factory=list)
    """For a resumable agent: the conversations of its session so far, with the model's answers, the
    one that was continued last at the end. Empty where the session begins.
    """

    @property
    def question(self) -> str:
        """Return the last message of the user."""
        return next(
            (str(m["content"]) for m in reversed(self.messages) if m.get("role") == "user"), ""
        )


class AgentRunner(Protocol):
    """Runs an agent. A `resumable` one continues from `AgentTask.finished`."""

    resumable: bool

    async def run(self, task: AgentTask) -> dict[str, float] | None:
        """Return the reward that the agent gave itself, or None.

        Raises AgentError. Cancelling it ends the agent.
        """
        ...


class FunctionAgent:
    """Runs a function in this process."""

    def __init__(self, name: str, function: Callable[[AgentTask], Any]) -> None:
        self._name = name
        self._function = function
        self.resumable = bool(getattr(function, "resumable", False))
        # Its own threads: the worker's load weights and submit groups while agents wait for a
        # paused engine.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="agent")

    async def run(self, task: AgentTask) -> dict[str, float] | None:
        try:
            if inspect.iscoroutinefunction(self._function):
                result = await self._function(task)
            else:
                outcome = await asyncio.get_running_loop().run_in_executor(
                    self._threads, attempt, f"agent {self._name}", partial(self._function, task)
                )
                result = outcome.get()
        except USER_ERRORS as error:  # an agent may raise anything; it fails its rollout alone
            raise AgentError(f"agent {self._name} raised {describe(error)}") from error
        return None if result is None else check_reward(self._name, result)


class ProgramAgent:
    """Runs a program.

    In its arguments `{question}`, `{base_url}` and `{model}` are replaced. Raises ConfigError for
    `{api_key}`: every user of the machine can read the arguments of a program.
    """

    resumable = False

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [str(part) for part in command]
        if any("{api_key}" in part for part in self._command):
            raise ConfigError(
                "the agent's command would show {api_key} to every user of this machine",
                hint="leave it out: the program finds the key in its environment, OPENAI_API_KEY",
            )

    async def run(self, task: AgentTask) -> dict[str, float] | None:
        known = {
            "question": task.question,
            "base_url": task.base_url,
            "model": task.model,
        }
        names = ("messages", "data_source", "extra", "session_id", "finished")
        given = {name: getattr(task, name) for name in names}
        process = await asyncio.create_subprocess_exec(
            *(_fill(part, known) for part in self._command),
            env={**os.environ, "OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, stderr = await process.communicate(orjson.dumps(given, default=str))
        finally:
            await _end(process)
        if process.returncode:
            reason = stderr.decode(errors="replace").strip()[-LONGEST_STDERR:]
            raise AgentError(f"agent {self._command[0]} exited with {process.returncode}: {reason}")
        return None


def _fill(part: str, known: dict[str, str]) -> str:
    for name, value in known.items():
        part = part.replace(f"{{{name}}}", value)
    return part


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program with its whole session of processes, which might outlive it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    await asyncio.shield(process.wait())
