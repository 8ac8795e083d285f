"""The wires between the servers of a chaos run: relays that cut one server off from all others."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Backbone:
    """Relays, served by a thread of their own. A server reaches the others only through them.

    A server is known by the address that its connections come from (`bind-source-addr`).
    """

    def __init__(self) -> None:
        self._cut_off = ""
        self._open: dict[asyncio.StreamWriter, set[str]] = {}
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="backbone", daemon=True)
        self._thread.start()

    def relay(self, address: str, port: int, target: int) -> None:
        """Pass what arrives at `port` on to the port `target` of the server with this address."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends = {address, writer.get_extra_info("peername")[0]}
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._pass(ends, target, (reader, writer))
            writer.transport.abort()

        listening = asyncio.start_server(accept, "127.0.0.1", port)
        self._servers.append(asyncio.run_coroutine_threadsafe(listening, self._loop).result(10))

    async def _pass(
        self, ends: set[str], target: int, near: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        if self._cut_off in ends:
            return
        far = await asyncio.open_connection("127.0.0.1", target)
        self._open[near[1]] = ends
        pumps = [
            asyncio.ensure_future(_pump(near[0], far[1])),
            asyncio.ensure_future(_pump(far[0], near[1])),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._open[near[1]]
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            far[1].transport.abort()

    def isolate(self, address: str) -> None:
        """Let no server reach this one, nor it any other; "" for none."""
        self._loop.call_soon_threadsafe(self._isolate, address)

    def _isolate(self, address: str) -> None:
        self._cut_off = address
        for writer, ends in list(self._open.items()):
            if address in ends:
                writer.transport.abort()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
