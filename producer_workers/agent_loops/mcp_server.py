"""Call the tools of MCP servers, started or reached once per worker: `mcp` beside `tools`.

The producer starts them briefly, too, since their schemas go into the prompt.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from buffer.errors import ConfigError, ProcessUnavailable, UserCodeError
from buffer.imports import import_extra

log = logging.getLogger("rolloutmq.worker")

START_S = 60.0  # until a server must answer

ALIVE_S = 10.0  # for a server to answer beside a call that took too long


def keep_loopback_direct() -> None:
    """Add loopback to `no_proxy` of this process and of the programs that it starts.

    Otherwise HTTP clients that read `HTTP_PROXY` or `ALL_PROXY` would send an agent's prompts and
    key to a proxy, which cannot reach an endpoint of this machine.
    """
    # clients read one spelling, the other, or the first that they find
    known = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    hosts = [host.strip() for value in known for host in value.split(",")]
    if "*" not in hosts:
        value = ",".join(dict.fromkeys(filter(None, [*hosts, "127.0.0.1", "localhost", "::1"])))
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = value


class McpError(UserCodeError):
    """The server is gone, or answered a call with an error."""

    def __init__(self, message: str, *, told: str = "") -> None:
        super().__init__(message, told=told or f"McpError: {message}")


class McpServer:
    """One server. `command` is a program with its arguments, or a URL."""

    def __init__(self, command: Sequence[str] | str) -> None:
        keep_loopback_direct()
        self._command = command
        self._lock = asyncio.Lock()
        self._connection: _Connection | None = None

    @property
    def name(self) -> str:
        return self._command if isinstance(self._command, str) else " ".join(self._command)

    def schemas(self) -> list[dict[str, Any]]:
        """Return its tools in OpenAI's form, once the server answers. Raises ConfigError."""
        with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop already
            return thread.submit(asyncio.run, self._ask_schemas()).result()

    async def call(self, name: str, arguments: dict[str, Any], limit_s: float) -> str:
        """Return the text of one result. Raises McpError, or ProcessUnavailable if unreachable.

        McpError is the server's error, its end, or `limit_s`. Other calls continue, unless this one
        ended the server, or it hangs.
        """
        connection = await self._connect()
        try:
            async with asyncio.timeout(limit_s) as limit:
                result = await connection.client.call_tool(name, arguments)
        except Exception as error:  # a transport may raise anything; the next call reconnects
            if limit.expired():
                await self._end_if_hung(connection)
                message = f"{name} took longer than {limit_s:g} s"
                raise McpError(message, told=message) from error
            if not _is_answer(error):
                await self._forget(connection)
            raise McpError(f"MCP server {self.name}: {type(error).__name__}: {error}") from error
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise McpError(text)
        return text

    async def _end_if_hung(self, connection: _Connection) -> None:
        """Forget a server that does not answer at all: every later call would wait for it."""
        try:
            async with asyncio.timeout(ALIVE_S):
                await connection.client.session.list_tools()
        except Exception as error:  # a transport may raise anything
            if not _is_answer(error):
                log.warning("MCP server %s hangs, and is replaced", self.name)
                await self._forget(connection)

    async def _ask_schemas(self) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(START_S), _client(self._command) as client:
                tools = (await client.list_tools()).tools
        except Exception as error:  # the program is missing, or is not an MCP server
            raise ConfigError(
                f"MCP server {self.name} does not answer: {type(error).__name__}: {error}"
            ) from error
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in tools
        ]

    async def _connect(self) -> _Connection:
        async with self._lock:  # calls run at the same time; only one may start the server
            if self._connection is None:
                try:
                    self._connection = await _Connection.open(self._command)
                except Exception as error:  # a transport may raise anything
                    message = f"MCP server {self.name} cannot be started or reached: {error}"
                    raise ProcessUnavailable(message) from error
            return self._connection

    async def close(self) -> None:
        """End the connection and its program. The next call opens another one."""
        await self._forget(self._connection)

    async def _forget(self, connection: _Connection | None) -> None:
        """Close a connection; of the calls that fail with it, only the first does so."""
        if connection is not None and connection is self._connection:
            self._connection = None
            await connection.close()


class _Connection:
    """A client in its own task, since its scopes may not leave the task that opened them."""

    _task: asyncio.Task[None]

    def __init__(self) -> None:
        self.client: Any = None
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()

    @classmethod
    async def open(cls, command: Sequence[str] | str) -> _Connection:
        connection = cls()
        connection._task = asyncio.create_task(connection._hold_open(command), name="mcp")
        opened = asyncio.create_task(connection._opened.wait())
        try:
            await asyncio.wait(
                {opened, connection._task}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            opened.cancel()
        if connection.client is None:
            connection._task.cancel()
            await asyncio.gather(connection._task, return_exceptions=True)
            raise ConnectionError(f"it did not answer within {START_S:g} s")
        return connection

    async def close(self) -> None:
        self._closing.set()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _hold_open(self, command: Sequence[str] | str) -> None:
        async with _client(command) as client:
            self.client = client
            self._opened.set()
            await self._closing.wait()


def _is_answer(error: Exception) -> bool:
    """Return whether a live server answered with the error; a dead one causes the same kind."""
    types = import_module("mcp_types")
    return (
        isinstance(error, import_module("mcp").MCPError) and error.code != types.CONNECTION_CLOSED
    )


def _client(command: Sequence[str] | str) -> Any:
    mcp = import_extra("mcp", "an MCP server")
    if isinstance(command, str):
        return mcp.Client(command)
    return mcp.Client(mcp.StdioServerParameters(command=command[0], args=list(command[1:])))
