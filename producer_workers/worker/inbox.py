"""The inbox of a worker: everything that happens to it, in the order in which it happened.

The parts of a worker (groups, heartbeat, control client, ...) post events and do not call it. Only
the worker's own loop reads them, so every decision is in one place.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

from buffer.control.control import ControlState
from buffer.control.fleet import HeartbeatReply
from buffer.control.worker_record import HeartbeatReport
from buffer.groups.claim import Claim
from buffer.job import Job


class Signal(Enum):
    """An event without content."""

    STOP_ASKED = auto()
    """the process shall end: finish the groups that are held, then leave"""
    CONTROL_LINE_BROKEN = auto()
    """hints do not arrive and receipts do not leave until a new line is open"""
    REQUEST_FINISHED = auto()
    """the engine ended a request, so there may be room for another group"""
    JOBS_MAY_WAIT = auto()
    """the wait for a wake-up of the server ended, with or without one"""
    WEIGHTS_FETCHED = auto()
    """the newest weights are at hand, or cannot be fetched"""


@dataclass(frozen=True, slots=True)
class HintReceived:
    """The control channel published a state. It may be old, repeated or out of order."""

    state: ControlState


@dataclass(frozen=True, slots=True)
class ReceiptAnswered:
    """The server answered the receipt for epoch `ack`.

    `known_epoch`: the newest one that was known when the receipt was sent. `state` is None if the
    server does not know this registration.
    """

    state: ControlState | None
    ack: int
    known_epoch: int


@dataclass(frozen=True, slots=True)
class HeartbeatAnswered:
    """The server answered a heartbeat that carried `report`."""

    beat: HeartbeatReply
    report: HeartbeatReport


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One step of the worker ended: the engine follows the control state, and jobs were claimed.

    `claim` is None if there was no room or no answer. `known_epoch`: see ReceiptAnswered.
    """

    claim: Claim | None = None
    known_epoch: int = 0


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """A group was submitted, released or cancelled. `error`: what ends the worker, if anything."""

    job: Job
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A part cannot continue, so the worker cannot either.

    The engine died, another process registered under this id, or the run is gone.
    """

    error: BaseException


Event = (
    Signal
    | HintReceived
    | ReceiptAnswered
    | HeartbeatAnswered
    | StepFinished
    | GroupFinished
    | PartFailed
)


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
        """Add an event of another thread."""
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
