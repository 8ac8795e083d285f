"""Read server-sent events by their standard: https://html.spec.whatwg.org/#event-stream-interpretation."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator

from buffer.errors import RolloutMQError

_END = re.compile(rb"\r\n|\n|\r")  # of a line


class EventTooLong(RolloutMQError):
    """An event has more bytes than are read."""


async def event_data(chunks: AsyncIterable[bytes], longest: int) -> AsyncIterator[bytes]:
    """Yield the data of each event: its lines of data, joined by line breaks.

    Names and numbers of events are ignored, as is an event that the stream does not complete.
    `longest`: bytes of an event. Raises EventTooLong.
    """
    data = bytearray()
    async for line in _lines(chunks, longest):
        if not line:
            if data:
                yield bytes(data[:-1])
            data.clear()
        name, _, value = line.partition(b":")  # without a name, it is a comment
        if name == b"data":
            data += value.removeprefix(b" ") + b"\n"
            if len(data) > longest:
                raise EventTooLong(f"an event has more than {longest} bytes")


async def _lines(chunks: AsyncIterable[bytes], longest: int) -> AsyncIterator[bytes]:
    """Yield the lines that a stream completes, without their ends."""
    mark, line = b"\xef\xbb\xbf", bytearray()  # a byte order mark
    follows_return = False  # then a line break ends no other line
    async for chunk in chunks:
        first, *others = _END.split(chunk.removeprefix(b"\n") if follows_return else chunk)
        follows_return = chunk.endswith(b"\r")
        line += first
        for other in others:
            yield bytes(line).removeprefix(mark)
            mark, line = b"", bytearray(other)
        if len(line) > longest:
            raise EventTooLong(f"a line has more than {longest} bytes")
