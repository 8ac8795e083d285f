"""The tools of an MCP server: mcp = [["python", "server.py"], "http://host/mcp"] beside `tools`.

A command is started once for each worker and spoken to over its stdin and stdout; a server that
died is started again with the next call. Its schemas go into the prompt, so the producer starts it
too, for as long as it takes to ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from buffer.errors import ConfigError, RolloutMQError

START_S = 60.0
"""How long a server may take until it answers."""


class McpError(RolloutMQError):
    """The server is gone, or answered a call with an error."""


class McpServer:
    """One server. `command`: a program with its arguments, or the URL of one that runs."""

    def __init__(self, command: Sequence[str] | str) -> None:
        self._command = command
        self._lock = asyncio.Lock()
        self._connection: _Connection | None = None

    @property
    def name(self) -> str:
        return self._command if isinstance(self._command, str) else " ".join(self._command)

    def schemas(self) -> list[dict[str, Any]]:
        """What the chat template is given, in OpenAI's form; blocks until the server says so.
        Raises ConfigError.
        """
        with ThreadPoolExecutor(1) as thread:  # a worker is made within its event loop
            return thread.submit(asyncio.run, self._ask_schemas()).result()

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of one result. Raises McpError; other calls go on, unless the server died of
        this one.
        """
        connection = None
        try:
            connection = await self._connect()
            result = await connection.client.call_tool(name, arguments)
        except (
            Exception
        ) as error:  # whatever the transport raises: the server is asked anew with the next call
            if not _is_answer(error):
                await self._forget(connection)
            raise McpError(f"MCP server {self.name}: {type(error).__name__}: {error}") from error
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise McpError(text)
        return text

    async def _ask_schemas(self) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(START_S), _client(self._command) as client:
                tools = (await client.list_tools()).tools
        except Exception as error:  # a program that is not there, or is no MCP server
            raise ConfigError(
                f"MCP server {self.name} does not answer: {type(error).__name__}: {error}"
            ) from error
        return [
            {
                "type": "function",
                "function": {
                    "name": t.name,
                    "description": t.description or "",
                    "parameters": t.input_schema,
                },
            }
            for t in tools
        ]

    async def _connect(self) -> _Connection:
        async with self._lock:
            if self._connection is None:
                self._connection = await _Connection.open(self._command)
            return self._connection

    async def close(self) -> None:
        """End the connection, and a program that was started for it; the next call opens another
        one.
        """
        await self._forget(self._connection)

    async def _forget(self, connection: _Connection | None) -> None:
        """The same for one connection: of those that fail with it, only the first finds it here."""
        if connection is not None and connection is self._connection:
            self._connection = None
            await connection.close()


class _Connection:
    """A client in a task of its own, which opens it and closes it: its scopes may not leave their
    task.
    """

    def __init__(self) -> None:
        self.client: Any = None
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()

    @classmethod
    async def open(cls, command: Sequence[str] | str) -> _Connection:
        connection = cls()
        connection._task = asyncio.create_task(connection._live(command), name="mcp")
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
            raise McpError("it could not be started")
        return connection

    _task: asyncio.Task[None]

    async def close(self) -> None:
        self._closing.set()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self, command: Sequence[str] | str) -> None:
        async with _client(command) as client:
            self.client = client
            self._opened.set()
            await self._closing.wait()


def _is_answer(error: Exception) -> bool:
    """Whether the server refused a call, and lives; its end is an error of the same kind."""
    types = import_module("mcp_types")
    return (
        isinstance(error, import_module("mcp").MCPError) and error.code != types.CONNECTION_CLOSED
    )


def _client(command: Sequence[str] | str) -> Any:
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise ConfigError(
            "MCP servers need the package mcp", hint="pip install 'rolloutmq[mcp]'"
        ) from error
    if isinstance(command, str):
        return Client(command)
    return Client(StdioServerParameters(command=command[0], args=list(command[1:])))
