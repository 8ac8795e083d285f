"""The protocol of the ranks: rank 0 decides, and all ranks execute its orders.

rank 0                                    every other rank
lead(act)                                 follow()
  a method marked `on_all_ranks` ───────▶   executes it with the same arguments
the value or the error of `act` ──────▶   returns or raises it

Each order ends with an exchange, so no rank continues alone: one that dies or fails breaks it for
all others (RankLost, or an error of torch). Rank 0 notices a signal on any rank after the next
order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from buffer.errors import CheckpointNow, Fenced, GroupChanged, RankLost, StepFailed
from consumer.handle.batch import Stopped
from consumer.handle.ranks import Ranks

P = ParamSpec("P")
T = TypeVar("T")

SHARED_ERRORS: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointNow, Fenced, GroupChanged, Stopped, TimeoutError)
}  # the caller can act on these errors of rank 0, so every rank raises them unchanged


class Follower(Protocol):
    orders: RankOrders


F = TypeVar("F", bound=Follower)


def on_all_ranks(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Make all ranks execute a method when rank 0 calls it.

    Positional arguments are JSON values that all ranks get; keyword arguments stay on rank 0.
    """

    @wraps(method)
    def executed(self: F, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with_args = [type(self).__name__, method.__name__, args]
        return self.orders.execute(with_args, lambda: method(self, *args, **kwargs))

    return executed


class RankOrders:
    """The orders of rank 0 to all `ranks`; every rank adds the objects that execute them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # Set by a signal on any rank; rank 0 learns of it after an order.
        self.stopped = threading.Event()
        self.is_in_order = False  # True during an order, and for good after one that failed
        self._followers: dict[str, Follower] = {}

    def add(self, follower: Follower) -> None:
        self._followers[type(follower).__name__] = follower

    def execute(self, order: Sequence[Any], act: Callable[[], T]) -> T:
        """Pass an order to the other ranks, execute it, and wait until all have."""
        if self.ranks.rank == 0:
            if self.is_in_order and self.ranks.size > 1:
                raise StepFailed(
                    f"an order to all ranks failed on rank 0, so {order[1]} cannot follow",
                    hint="start the trainer again: it continues from the newest checkpoint",
                )
            self.ranks.share({"order": order})
        self.is_in_order = True
        result = act()
        if any(self.ranks.gather(self.stopped.is_set())):
            self.stopped.set()
        self.is_in_order = False
        return result

    def follow(self) -> Any:
        """Execute rank 0's orders; return or raise the result of its `lead`. Raises RankLost."""
        while True:
            message = self.ranks.share()
            if "value" in message:
                return message["value"]
            if "error" in message:
                kind = SHARED_ERRORS.get(message["error"], StepFailed)
                raise kind(f"rank 0: {message['error']}: {message['reason']}")
            name, method, args = message["order"]
            getattr(self._followers[name], method)(*args)

    def lead(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0, which may give orders; share its JSON value, or its error."""
        try:
            value = act()
        except Exception as error:  # the other ranks wait for it, and raise it as well
            if not self.is_in_order:
                self.ranks.share({"error": type(error).__name__, "reason": str(error)})
            raise
        self.ranks.share({"value": value})
        return value

    def end(self) -> None:
        """Let the other ranks end; those in an order that failed notice the end of this process."""
        if not self.is_in_order:
            with suppress(RankLost):  # it needs no order any more
                self.ranks.share({"value": None})
