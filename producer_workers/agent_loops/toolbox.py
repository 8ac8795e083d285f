"""Run the tools of a task: functions and MCP tools that a model may call, with a time limit.

The model gets a tool's result as text, and any error that it may have caused: an unknown name,
wrong arguments, an exception, the time limit, the end of the tool's process. If a tool cannot be
called at all, the group fails: the model would learn from a false result.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import orjson
from pydantic import TypeAdapter, ValidationError, validate_call

from buffer.errors import (
    ConfigError,
    JudgeError,
    ProcessUnavailable,
    SandboxUnavailable,
    UserCodeError,
    text_of,
)
from buffer.imports import load_object
from buffer.wire.rollout import ToolCall
from producer_workers.agent_loops.mcp_server import McpServer
from producer_workers.config.sandbox import BUBBLEWRAP
from producer_workers.user_code.border import Border, Rules
from producer_workers.user_code.process_function import ProcessFunction, call_of
from producer_workers.user_code.sandbox import Limits, check_sandbox, run_program
from producer_workers.user_code.user_function import UserFunction

LONGEST_RESULT = 8192  # characters of a result that the model sees

_THREADS = 16
_PYTHON_THREADS = ThreadPoolExecutor(_THREADS, thread_name_prefix="python")

# A plain or coroutine function with annotated arguments and a docstring for the model,
# "module:function", or a name of BUILT_IN.
Tool = str | Callable[..., Any]

BUILT_IN = ("python",)

McpCommand = str | Sequence[str]  # a program that is an MCP server, or the URL of one


class ToolBorder(Border):
    """Takes the arguments of a tool by name, as the model gave them."""

    def prepare(self, function: Any, options: Mapping[str, Any]) -> Any:
        return validate_call(function)

    def call(self, function: Any, *arguments: Any) -> Any:
        return function(**arguments[0])

    def check(self, name: str, result: Any, *arguments: Any) -> str:
        text = result if isinstance(result, str) else orjson.dumps(result, default=str).decode()
        return text[:LONGEST_RESULT].encode(errors="replace").decode()

    def trace(self, error: BaseException) -> str:
        # the model gave wrong arguments
        return "" if isinstance(error, ValidationError) else super().trace(error)

    def told(self, error: BaseException) -> str:
        if isinstance(error, ValidationError):
            faults = [
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
                for fault in error.errors(include_url=False)
            ]
            return f"the arguments of {error.title} do not fit: {'; '.join(faults)}"
        text = text_of(error)
        name = type(error).__name__
        return f"{name}: {text}"[:LONGEST_RESULT] if text else name


TOOL = ToolBorder()


class Toolbox:
    """Functions by name, and the tools of MCP servers. Raises ConfigError if one fails to load.

    `call_timeout_s` limits a call, without its wait for a turn. `sandbox` runs the tool `python`,
    as in `JudgingSection`. Each function named by a path has up to `processes` processes with
    `memory_mb` of address space each.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        *,
        mcp: Sequence[McpCommand] = (),
        call_timeout_s: float = 30.0,
        sandbox: str = BUBBLEWRAP,
        processes: int = 8,
        memory_mb: int = 4096,
    ) -> None:
        if "python" in tools:
            check_sandbox(sandbox)
        functions = _load(tools, sandbox)
        self._functions = {
            name: _call_of(
                name, tool, function, call_timeout_s, processes=processes, memory_mb=memory_mb
            )
            for (name, function), tool in zip(functions.items(), tools, strict=True)
        }
        self._servers = {
            schema["function"]["name"]: server
            for server in map(McpServer, mcp)
            for schema in server.schemas()
        }
        _refuse_duplicates([*self._functions, *self._servers])
        self._timeout_s = call_timeout_s

    async def call_all(self, calls: Sequence[ToolCall]) -> list[str]:
        """Run the calls at the same time; return their results. Raises ProcessUnavailable."""
        return await asyncio.gather(*(self._call(call) for call in calls))

    async def close(self) -> None:
        for function in self._functions.values():
            function.close()
        for server in set(self._servers.values()):
            await server.close()

    async def _call(self, call: ToolCall) -> str:
        if call.arguments is None:
            why = "this call cannot be read, or has an integer over 64 bits"
            return f"error: {why}: {call.raw_arguments[:200]}"
        known = [*self._functions, *self._servers]
        if call.name not in known:
            return f"error: there is no tool {call.name!r}; known: {', '.join(known)}"
        try:
            if function := self._functions.get(call.name):
                return str(await function(call.arguments))
            server = self._servers[call.name]
            result = await server.call(call.name, call.arguments, self._timeout_s)
            return result[:LONGEST_RESULT]
        except UserCodeError as error:  # the model gets the tool's failure as its result
            return f"error: {error.told}"[:LONGEST_RESULT]


def _call_of(
    name: str, tool: Tool, function: Any, limit_s: float, *, processes: int, memory_mb: int
) -> UserFunction | ProcessFunction:
    is_built_in = tool in BUILT_IN
    rules = Rules(
        what=f"tool {name!r}",
        name=name,
        # a program has a limit of its own; what a service takes longer is not the model's fault
        limit_s=math.inf if is_built_in else limit_s,
        limit_key="agent_loop_options.call_timeout_s",
        memory_mb=memory_mb,
        memory_key="agent_loop_options.memory_mb",
        processes=processes,
        mode="coroutines" if inspect.iscoroutinefunction(function) else "plain",
    )
    path = tool if isinstance(tool, str) and not is_built_in else None
    return call_of(function, f"{__name__}:TOOL", rules, path=path, turns=_THREADS)


def tool_schemas(tools: Sequence[Tool], mcp: Sequence[McpCommand] = ()) -> list[dict[str, Any]]:
    """Return one JSON schema per tool, in OpenAI's form, for the chat template."""
    own = [
        {"type": "function", "function": _schema(function)} for function in _load(tools).values()
    ]
    return own + [schema for server in map(McpServer, mcp) for schema in server.schemas()]


def _load(tools: Sequence[Tool], sandbox: str = BUBBLEWRAP) -> dict[str, Callable[..., Any]]:
    functions: list[Any] = []
    for tool in tools:
        function: Any = tool
        if tool == "python":
            function = python_tool(sandbox)
        elif isinstance(tool, str):
            function = load_object(tool, kind="tool", built_in=BUILT_IN)
        if not inspect.isroutine(function):
            raise ConfigError(f"tool {tool!r} is not a function", hint='give "module:function"')
        functions.append(function)
    _refuse_duplicates([function.__name__ for function in functions])
    return {function.__name__: function for function in functions}


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
    async def python(code: str) -> str:
        """Run a Python program. Returns what it prints. Nothing is kept between two calls."""
        # The docstring above is what the model reads about this tool.
        limits = Limits(time_s=10.0, memory_mb=1024)
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(
                _PYTHON_THREADS, run_program, code, "", limits, sandbox
            )
        except (SandboxUnavailable, JudgeError, OSError) as error:
            hint = getattr(error, "hint", "")
            raise ProcessUnavailable(
                f"no program of a model can run: {error}", hint=hint
            ) from error
        return outcome.describe()

    return python
