"""How a client of a chaos run reaches one server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """To the socket `path`, or to `port` on this machine."""

    name: str
    path: str = ""
    port: int = 0
    announced: int = 0
    """the port that servers name for it in their replies: of five digits, like any that a link has"""

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError."""
        if self.path:
            return await asyncio.open_unix_connection(self.path)
        return await asyncio.open_connection("127.0.0.1", self.port)

    def replace_port(self, data: bytes, port: int) -> bytes:
        """Put another port into a reply of a Sentinel, of CLUSTER SLOTS, and into MOVED and ASK.

        The length stays the same, so it fits into a reply that is read in pieces.
        """
        for text in ("$5\r\n%d\r\n", "127.0.0.1\r\n:%d\r\n", "127.0.0.1:%d"):
            data = data.replace(text.encode() % self.announced, text.encode() % port)
        return data
