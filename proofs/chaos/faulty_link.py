"""The wire between one client and the server: a TCP relay that can lose, delay and falsify what
passes.

    strike (once, at the next command that fits)         spell (for some seconds)
    before       the command is lost                     delay     every reply comes later
    mid_request  half of it arrives                      throttle  replies come as a trickle
    after        carried out, and nobody hears of it     split     replies come in pieces of some bytes
    mid_reply    half of the reply arrives               half_open nothing passes, and nobody is told
                                                         stall     what is asked comes later than its lease
    answer       an error instead of an answer; the server never sees the command

All but `answer` and the spells end the connection, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from proofs.chaos.resp import Command, split_commands
from proofs.chaos.way import Way

STRIKES = ("before", "mid_request", "after", "mid_reply", "answer")
SPELLS = ("delay", "throttle", "split", "half_open", "stall")

DELAY_S = 0.2
TRICKLE_BYTES = 512
TRICKLE_S = 0.01
PIECE_BYTES = 3
PIECES = 40
SETTLE_S = 0.05
"""A server that has answered the first command of a packet has carried out the others by then."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One of STRIKES, at the next script call; `script` "" fits any. `reply`: the error of
    `answer`.
    """

    kind: str
    script: str = ""
    reply: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.reply.split()[0]}" if self.reply else self.kind


class FaultyLink:
    """One client's ways to the servers. `told(kind, script)` is called for every strike."""

    def __init__(
        self, ways: Sequence[Way], told: Callable[[str, str], None], anywhere: list[Strike]
    ) -> None:
        """`anywhere`: strikes of all links together; the first command of any of them that fits
        takes one.
        """
        self._ways = ways
        self._told = told
        self._strikes: list[Strike] = []
        self._anywhere = anywhere
        self._spells: dict[str, float] = {}
        self._servers: list[asyncio.Server] = []
        self._cut: set[str] = set()
        self._open: dict[str, set[asyncio.StreamWriter]] = {way.name: set() for way in ways}
        self.ports: dict[str, int] = {}
        """by the name of the way"""

    async def listen(self) -> None:
        for way in self._ways:
            server = await asyncio.start_server(partial(self._accept, way), "127.0.0.1", 0)
            self._servers.append(server)
            self.ports[way.name] = server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Accept no connection any more. On the loop's thread."""
        for server in self._servers:
            server.close()

    def own_ports(self, data: bytes) -> bytes:
        for way in self._ways:
            if way.announced:
                data = way.replace_port(data, self.ports[way.name])
        return data

    def cut(self, names: set[str]) -> None:
        """End all connections of these ways, and refuse new ones; {} for none. On the loop's
        thread.
        """
        self._cut = names
        for name in names:
            for writer in list(self._open[name]):
                writer.transport.abort()

    # -- for the nemesis, on any thread --------------------------------------

    def arm(self, strike: Strike) -> None:
        self._strikes.append(strike)

    def cast(self, spell: str, seconds: float) -> None:
        self._spells[spell] = time.monotonic() + seconds

    def calm(self) -> None:
        """No fault any more."""
        self._strikes.clear()
        self._spells.clear()

    # -- for the relays ------------------------------------------------------

    def is_under(self, spell: str) -> bool:
        return time.monotonic() < self._spells.get(spell, 0.0)

    def strike_at(self, command: Command, *, alone: bool) -> Strike | None:
        """The strike that is due at a command. An error can only stand for a command that came
        `alone`.
        """
        if not command.script:
            return None
        for strikes in (self._strikes, self._anywhere):
            for strike in strikes:
                if strike.script in ("", command.script) and (alone or strike.kind != "answer"):
                    strikes.remove(strike)
                    self._told(strike.name, command.script)
                    return strike
        return None

    async def _accept(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            if way.name in self._cut:
                raise ConnectionRefusedError
            far = await way.connect()
        except OSError:  # the server is down: so is this connection
            writer.close()
            return
        self._open[way.name].add(writer)
        # cancelled only when all is over; asyncio's streams would log that as an error
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await _Relay(self, (reader, writer), far).run()
        self._open[way.name].discard(writer)


class _Relay:
    """One connection."""

    def __init__(
        self,
        link: FaultyLink,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._link = link
        (self._from_client, self._to_client), (self._from_server, self._to_server) = near, far
        self._at_reply = ""
        self._is_quiet = True

    async def run(self) -> None:
        """Until one end hangs up, or a strike ends it."""
        pumps = [asyncio.ensure_future(self._requests()), asyncio.ensure_future(self._replies())]
        ends = (self._to_client, self._to_server)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in ends:
                end.close()
            await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)

    async def _requests(self) -> None:
        rest = b""
        while data := await self._from_client.read(65536):
            if await self._is_cut_by_half_open():
                return
            while self._link.is_under("stall"):
                await asyncio.sleep(SETTLE_S)
            commands, rest = split_commands(rest + data)
            alone = len(commands) == 1 and not rest and self._is_quiet
            for command in commands:
                if not await self._request(command, self._link.strike_at(command, alone=alone)):
                    return

    async def _request(self, command: Command, strike: Strike | None) -> bool:
        """Pass a command on; whether the connection goes on."""
        match strike.kind if strike else "":
            case "before":
                return False
            case "mid_request":
                self._to_server.write(command.data[: len(command.data) // 2])
                await self._to_server.drain()
                return False
            case "answer":
                assert strike is not None
                self._to_client.write(f"-{strike.reply}\r\n".encode())
                await self._to_client.drain()
                return True
            case "after" | "mid_reply" as kind:
                self._at_reply = kind
        self._is_quiet = False
        self._to_server.write(command.data)
        await self._to_server.drain()
        return True

    async def _replies(self) -> None:
        while data := await self._from_server.read(65536):
            self._is_quiet = True
            if self._at_reply:
                if self._at_reply == "mid_reply":
                    self._to_client.write(data[: len(data) // 2])
                    await self._to_client.drain()
                await asyncio.sleep(SETTLE_S)
                return
            if await self._is_cut_by_half_open():
                return
            await self._reply(data)

    async def _reply(self, data: bytes) -> None:
        data = self._link.own_ports(data)
        if self._link.is_under("delay"):
            await asyncio.sleep(DELAY_S)
        if self._link.is_under("split"):
            for start in range(0, PIECES * PIECE_BYTES, PIECE_BYTES):
                await self._send(data[start : start + PIECE_BYTES])
            data = data[PIECES * PIECE_BYTES :]
        if self._link.is_under("throttle"):
            for start in range(0, len(data), TRICKLE_BYTES):
                await self._send(data[start : start + TRICKLE_BYTES])
                await asyncio.sleep(TRICKLE_S)
            return
        await self._send(data)

    async def _send(self, data: bytes) -> None:
        self._to_client.write(data)
        await self._to_client.drain()

    async def _is_cut_by_half_open(self) -> bool:
        """While the wire is half open what comes is lost; afterwards the connection is found to be
        dead.
        """
        was = False
        while self._link.is_under("half_open"):
            was = True
            await asyncio.sleep(SETTLE_S)
        return was


class Wiring:
    """The links of all clients by name, served by a thread of their own. `told(link, kind,
    script)`: see FaultyLink.
    """

    def __init__(
        self, ways: Callable[[], Sequence[Way]], told: Callable[[str, str, str], None]
    ) -> None:
        """`ways`: to all servers, once they are up."""
        self._ways = ways
        self._told = told
        self.links: dict[str, FaultyLink] = {}
        self.anywhere: list[Strike] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wiring", daemon=True)
        self._thread.start()

    def link(self, name: str) -> FaultyLink:
        """The link of a client, made when it is first asked for."""
        if name not in self.links:
            link = FaultyLink(
                self._ways(), lambda kind, script: self._told(name, kind, script), self.anywhere
            )
            asyncio.run_coroutine_threadsafe(link.listen(), self._loop).result(10)
            self.links[name] = link
        return self.links[name]

    def cut(self, name: str, ways: set[str]) -> None:
        """Cut the link of a client off from these servers, and from no other."""
        self._loop.call_soon_threadsafe(self.links[name].cut, ways)

    def calm(self) -> None:
        self.anywhere.clear()
        for name, link in self.links.items():
            link.calm()
            self.cut(name, set())

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        for link in self.links.values():
            link.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
