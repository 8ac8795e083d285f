"""Run the tools of a task: functions and MCP tools that a model may call, with a time limit.

What a tool returns is text for the model. An error is text for the model, too: an unknown name,
arguments that do not fit, an exception, the time limit. A tool cannot end a rollout.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import orjson
from pydantic import TypeAdapter, ValidationError, validate_call

from buffer.config.sections.sandbox import BUBBLEWRAP
from buffer.errors import ConfigError
from buffer.model.dotted_path import load_object
from buffer.rollouts.own_copy import own_copy
from buffer.rollouts.rollout import ToolCall
from producer_workers.agent_loops.mcp_server import McpServer
from producer_workers.user_code.program import Limits
from producer_workers.user_code.sandbox import check_sandbox, run_program
from producer_workers.user_code.user_function import USER_ERRORS, attempt

_THREADS = 16
_PYTHON_THREADS = ThreadPoolExecutor(_THREADS, thread_name_prefix="python")
PYTHON_LIMITS = Limits(time_s=10.0, memory_mb=1024)

LONGEST_RESULT = 8192
"""Characters of a result that the model gets to see."""


Tool = str | Callable[..., Any]
"""A plain or coroutine function with annotated arguments and a docstring for the model.

Or "module:function", or a name of BUILT_IN.
"""

BUILT_IN = ("python",)

McpCommand = str | Sequence[str]
"""A program with its arguments that is an MCP server, or the URL of one."""


class Toolbox:
    """Functions by name, and the tools of MCP servers.

    Raises ConfigError where one fails to load.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        mcp: Sequence[McpCommand] = (),
        call_timeout_s: float = 30.0,
        sandbox: str = BUBBLEWRAP,
    ) -> None:
        if "python" in tools:
            check_sandbox(sandbox)
        self._functions = _load(tools, sandbox)
        self._checked = {
            name: validate_call(function) for name, function in self._functions.items()
        }
        self._servers = {
            schema["function"]["name"]: server
            for server in map(McpServer, mcp)
            for schema in server.schemas()
        }
        _refuse_duplicates([*self._functions, *self._servers])
        self._timeout_s = call_timeout_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tool")

    async def call_all(self, calls: Sequence[ToolCall]) -> list[str]:
        """Run the calls at the same time and return their results in order."""
        return await asyncio.gather(*(self._call(call) for call in calls))

    async def close(self) -> None:
        """End the connections to MCP servers, and the servers that were started here."""
        for server in set(self._servers.values()):
            await server.close()

    async def _call(self, call: ToolCall) -> str:
        if call.arguments is None:
            return f"error: this call cannot be read: {call.raw_arguments[:200]}"
        known = [*self._functions, *self._servers]
        if call.name not in known:
            return f"error: there is no tool {call.name!r}; known: {', '.join(known)}"
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await self._run(call.name, own_copy(call.arguments))
        except TimeoutError:
            return f"error: {call.name} took longer than {self._timeout_s:g} s"
        except ValidationError as error:
            faults = [
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
                for fault in error.errors(include_url=False)
            ]
            return f"error: the arguments of {call.name} do not fit: {'; '.join(faults)}"
        except USER_ERRORS as error:  # the model gets the tool's failure as its result
            return f"error: {type(error).__name__}: {error}"[:LONGEST_RESULT]
        text = result if isinstance(result, str) else orjson.dumps(result, default=str).decode()
        return text[:LONGEST_RESULT]

    async def _run(self, name: str, arguments: dict[str, Any]) -> Any:
        if name in self._servers:
            return await self._servers[name].call(name, arguments)
        function = self._checked[name]
        if inspect.iscoroutinefunction(self._functions[name]):
            return await function(**arguments)
        outcome = await asyncio.get_running_loop().run_in_executor(
            self._threads, attempt, f"tool {name!r}", partial(function, **arguments)
        )
        return outcome.get()


def tool_schemas(tools: Sequence[Tool], mcp: Sequence[McpCommand] = ()) -> list[dict[str, Any]]:
    """Return what the chat template is given: one JSON schema per tool, in OpenAI's form."""
    own = [
        {"type": "function", "function": _schema(function)} for function in _load(tools).values()
    ]
    return own + [schema for server in map(McpServer, mcp) for schema in server.schemas()]


def _load(tools: Sequence[Tool], sandbox: str = BUBBLEWRAP) -> dict[str, Callable[..., Any]]:
    functions = [_function(tool, sandbox) for tool in tools]
    for tool, function in zip(tools, functions, strict=True):
        if not inspect.isroutine(function):
            raise ConfigError(f"tool {tool!r} is not a function", hint='give "module:function"')
    _refuse_duplicates([function.__name__ for function in functions])
    return {function.__name__: function for function in functions}


def _function(tool: Tool, sandbox: str) -> Any:
    if tool == "python":
        return python_tool(sandbox)
    if isinstance(tool, str):
        return load_object(tool, kind="tool", built_in=BUILT_IN)
    return tool


def _refuse_duplicates(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise ConfigError(f"two tools have the same name: {list(names)}")


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"properties": {}}
    if inspect.signature(function).parameters:
        schema = TypeAdapter[Any](cast(Any, function)).json_schema()
    kept = {key: schema[key] for key in schema if key in ("properties", "required", "$defs")}
    return {
        "name": function.__name__,
        "description": inspect.getdoc(function) or "",
        "parameters": {"type": "object", **kept},
    }


def python_tool(sandbox: str) -> Callable[..., Any]:
    """Return the tool that runs the programs of a model in `sandbox`."""

    async def python(code: str) -> str:
        """Run a Python program. Returns what it prints. Nothing is kept between two calls."""
        # The docstring above is what the model reads about this tool.
        outcome = await asyncio.get_running_loop().run_in_executor(
            _PYTHON_THREADS, run_program, code, "", PYTHON_LIMITS, sandbox
        )
        return outcome.describe()

    return python
