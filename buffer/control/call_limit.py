"""Limits on calls of a service, which all processes of all runs on a server keep together.

    limit    the quota: calls and tokens a minute, calls in progress; runs that name it share it
    flow     a task of a run; flows that wait have one turn each, by round robin
    caller   what makes the calls of one flow in one process; it holds what it may do for a lease

If a caller dies, its slots are free again after the lease, and permits that it did not use are lost
(at most those of half a second). A server that lost its data learns the slots from the next calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from buffer.ids import new_nonce
from buffer.redis.keys import LIMITS, Keys
from buffer.redis.scripts import Arg
from buffer.redis.store import Store

MOST_WANTED = 64
"""Calls for which one caller waits at the server at once; further ones wait in the caller."""


class CallLimit(NamedTuple):
    """A quota, by its name. 0: without this limit."""

    name: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    at_once: int = 0

    def __str__(self) -> str:
        units = zip(self[1:], ("requests a minute", "tokens a minute", "at once"), strict=True)
        words = (f"{number} {unit}" for number, unit in units if number)
        return f"{self.name} ({', '.join(words)})"


@dataclass(slots=True)
class CallerState:
    """What a caller reports: numbers since it began.

    `known`: permits that it got; `ended`: those of them whose calls ended; `unused`: tokens that
    these had permits for and did not use; `refused`: calls that the service refused, the last time
    for `pause_ms`.
    """

    known: int = 0
    ended: int = 0
    unused: int = 0
    refused: int = 0
    pause_ms: int = 0


class Caller:
    """Asks for the permits of one flow, for one process."""

    def __init__(self, store: Store, limit: CallLimit, flow: str, lease_ms: int) -> None:
        self._keys = Keys(limit.name, LIMITS)
        self._store = store.at(self._keys.prefix)
        self._id = new_nonce()
        self._fixed: dict[str, Arg] = {"caller": self._id, "flow": flow, "lease_ms": lease_ms}
        self._fixed |= limit._asdict()
        del self._fixed["name"]

    def ask(self, state: CallerState, wanted: Sequence[int]) -> tuple[float, list[float]]:
        """Report `state`, and ask for permits of calls that use `wanted` tokens each.

        Return when to ask again unless the bell rings before (0: never), and of each permit behind
        `state.known`, when to call, in seconds. Raises StoreUnavailable.
        """
        args = self._fixed | asdict(state)
        reply = self._store.call("permit", self._keys.slots(), args, tail_args=wanted)
        again_s, *delays_s = (int(ms) / 1000 for ms in reply[1:])
        return again_s, delays_s

    def wait(self, timeout_s: float) -> bool:
        """Wait until another caller's call gave this one permits, or freed a slot."""
        return self._store.wait(self._keys.wake_up(self._id), timeout_s)
