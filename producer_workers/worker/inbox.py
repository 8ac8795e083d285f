"""The inbox of a worker: its parts post events, which only the worker's own loop reads."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

from buffer.control.control import ControlState
from buffer.control.fleet import HeartbeatReply
from buffer.control.worker_record import HeartbeatReport
from buffer.groups.claim import Claim


class Signal(Enum):
    """An event without content."""

    STOP_ASKED = auto()  # finish the groups that are held, then leave
    CONTROL_LINE_BROKEN = auto()  # no hints or receipts until a new line is open
    REQUEST_FINISHED = auto()  # the engine may have room for another group
    JOBS_MAY_WAIT = auto()  # the wait for a wake-up of the server ended, with or without one
    GROUP_IS_LATE = auto()  # a group is over its time limit
    WEIGHTS_FETCHED = auto()  # the newest weights are at hand, or cannot be fetched


@dataclass(frozen=True, slots=True)
class HintReceived:
    """The control channel published a state, which may be old, repeated or out of order."""

    state: ControlState


@dataclass(frozen=True, slots=True)
class ReceiptAnswered:
    """The server answered the receipt for epoch `ack`; `state` is None for an unknown registration.

    `known_epoch`: the newest one that the worker knew when it sent the receipt.
    """

    state: ControlState | None
    ack: int
    known_epoch: int


@dataclass(frozen=True, slots=True)
class HeartbeatAnswered:
    beat: HeartbeatReply
    report: HeartbeatReport


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step ended; `claim` is None without room or answer. `known_epoch`: see ReceiptAnswered."""

    claim: Claim | None = None
    known_epoch: int = 0


@dataclass(frozen=True, slots=True)
class PartEnded:
    """A group was submitted, released or cancelled, or a part of the worker ended.

    `error`: what ends the worker, if anything: the engine died, another process registered this id,
    or the run is gone.
    """

    error: BaseException | None


Event = Signal | HintReceived | ReceiptAnswered | HeartbeatAnswered | StepFinished | PartEnded


class Inbox:
    """A queue of events with one reader. Belongs to the event loop that calls `open`."""

    def __init__(self) -> None:
        self._events = asyncio.Queue[Event]()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Accept events of other threads from now on."""
        self._loop = asyncio.get_running_loop()

    def post(self, event: Event) -> None:
        """Add an event. Called on the event loop."""
        self._events.put_nowait(event)

    def post_from_thread(self, event: Event) -> None:
        assert self._loop, "the inbox is not open"
        self._loop.call_soon_threadsafe(self.post, event)

    async def read(self, until_s: float) -> Event | None:
        """Return the next event, or None at `until_s` on the loop's clock."""
        if not self._events.empty():  # most of the time; a timeout costs more than an event
            return self._events.get_nowait()
        try:
            async with asyncio.timeout_at(until_s):
                return await self._events.get()
        except TimeoutError:
            return None
