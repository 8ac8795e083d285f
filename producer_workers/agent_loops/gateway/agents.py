"""Starts an agent: a function of the user's in this process, or a program of its own.

    agent = "my_agent:solve"        async def solve(task: AgentTask) -> reward or None; a plain function gets a thread
    command = ["python", "agent.py"]    OPENAI_BASE_URL and OPENAI_API_KEY in its environment, its task as JSON on stdin

A program is ended together with all that it started. Its exit code other than 0 fails the rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from buffer.errors import RolloutMQError
from producer_workers.judges.judge import check_reward

_THREADS = 256
"""Plain functions at the same time; more wait."""

MODEL = "policy"
"""What the model is called; any other name is answered, too."""

LONGEST_COMPLAINT = 2000
"""Characters of a program's stderr that are kept where it failed."""


class AgentError(RolloutMQError):
    """The agent raised, exited with another code than 0, or took too long."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent is told. `OpenAI(base_url=task.base_url, api_key=task.api_key)` is its client."""

    base_url: str
    api_key: str
    messages: list[dict[str, Any]]
    data_source: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    ground_truth: Any = None
    """for functions that compute their own reward; a program is not told"""
    model: str = MODEL

    @property
    def question(self) -> str:
        """The last thing that the user said."""
        return next(
            (str(m["content"]) for m in reversed(self.messages) if m.get("role") == "user"), ""
        )


class AgentRunner(Protocol):
    async def run(self, task: AgentTask) -> dict[str, float] | None:
        """The reward that the agent gave itself, or None. Raises AgentError; cancelling it ends the
        agent.
        """
        ...


class FunctionAgent:
    """A function in this process."""

    def __init__(self, name: str, function: Callable[[AgentTask], Any]) -> None:
        self._name = name
        self._function = function
        # its own: the worker's threads load weights and hand in groups while agents wait for a
        # frozen engine
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="agent")

    async def run(self, task: AgentTask) -> dict[str, float] | None:
        try:
            if inspect.iscoroutinefunction(self._function):
                result = await self._function(task)
            else:
                result = await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._function, task
                )
        except Exception as error:  # the agent's failure is its rollout's
            raise AgentError(
                f"agent {self._name} raised {type(error).__name__}: {error}"
            ) from error
        return None if result is None else check_reward(self._name, result)


class ProgramAgent:
    """A program; `{question}`, `{base_url}`, `{api_key}` and `{model}` in its arguments are filled
    in.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [str(part) for part in command]

    async def run(self, task: AgentTask) -> dict[str, float] | None:
        known = {
            "question": task.question,
            "base_url": task.base_url,
            "api_key": task.api_key,
            "model": task.model,
        }
        told = {"messages": task.messages, "data_source": task.data_source, "extra": task.extra}
        process = await asyncio.create_subprocess_exec(
            *(_fill(part, known) for part in self._command),
            env={**os.environ, "OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, complaint = await process.communicate(orjson.dumps(told, default=str))
        finally:
            await _end(process)
        if process.returncode:
            said = complaint.decode(errors="replace").strip()[-LONGEST_COMPLAINT:]
            raise AgentError(f"agent {self._command[0]} exited with {process.returncode}: {said}")
        return None


def _fill(part: str, known: dict[str, str]) -> str:
    for name, value in known.items():
        part = part.replace(f"{{{name}}}", value)
    return part


async def _end(process: asyncio.subprocess.Process) -> None:
    """What it started may outlive it: the whole session of processes goes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    await asyncio.shield(process.wait())
