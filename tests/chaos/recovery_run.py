"""How long it takes until work goes on, after the death of one of each kind.

worker    until the last group that it held is claimed by another worker        (its lease, and a sweep)
trainer   until the next batch is delivered to the trainer that is started      (its start, too)
producer  until another one has enqueued                                        (the role's time-out)
server    until the next result is accepted                                     (its start, too)
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from statistics import median

from tests.chaos.harness import ChaosRun
from tests.chaos.history import CLAIMED, Event, read_history
from tests.chaos.plan import LEASE_MS, SERVER

DEATHS = 5
"""Of each kind."""

SETTLE_S = 1.5 * LEASE_MS / 1000
"""Between two deaths, at least."""


class RecoveryRun(ChaosRun):
    """Kills a worker, the trainer, the active producer and the server, DEATHS times each, one by
    one.
    """

    def _strike(self) -> None:
        for _ in range(DEATHS):
            for kind in ("worker", "trainer", "producer", SERVER):
                self._work_for(SETTLE_S)
                target = self._target(kind)
                self._await_work(target)
                self.history.note("fault", kind=kind, target=target)
                if kind == SERVER:
                    self._server.kill()
                    self._server.start()
                    self._set_fsync()
                else:
                    self.crew.members[target].send(signal.SIGKILL)
        self._work_for(2 * SETTLE_S)

    def _target(self, kind: str) -> str:
        if kind != "producer":
            return {"worker": "worker-0", "trainer": "trainer", SERVER: SERVER}[kind]
        enqueued = [
            event for event in read_history(self.folders.history) if event["op"] == "enqueue"
        ]
        return str(enqueued[-1]["who"])

    def _await_work(self, target: str) -> None:
        end = time.monotonic() + self._recover_s
        while (
            not self.crew.are_at_work("trainer" if target == SERVER else target)
            and time.monotonic() < end
        ):
            self._turn()


def table(events: Sequence[Event]) -> list[str]:
    """A line for each kind: median and longest time, in seconds and leases."""
    found: dict[str, list[float]] = {}
    for fault in (event for event in events if event["op"] == "fault"):
        later = [event for event in events if event["t"] > fault["t"]]
        if (seconds := RESUMED[fault["kind"]](fault, events, later)) is not None:
            found.setdefault(fault["kind"], []).append(seconds)
    lease = LEASE_MS / 1000
    return [
        f"{kind:>10}  median {median(times):.2f} s, longest {max(times):.2f} s = {max(times) / lease:.2f} leases"
        f" ({len(times)} deaths)"
        for kind, times in found.items()
    ]


def _worker(fault: Event, events: Sequence[Event], later: Sequence[Event]) -> float | None:
    """The last claim, by another, of what the dead one held."""
    held: set[str] = set()
    for event in events:
        if event["t"] > fault["t"]:
            break
        if event["who"] == fault["target"] and event["op"] == "claim":
            held.update(event["reply"][CLAIMED])
        if event["op"] in ("submit", "release") and event["phase"] == "ok":
            held.discard(event["args"]["gid"])
    again: dict[str, Event] = {}
    for event in later:
        if event["op"] == "claim":
            again |= {
                gid: event for gid in event["reply"][CLAIMED] if gid in held and gid not in again
            }
    return max((event["t"] - fault["t"] for event in again.values()), default=None)


def _next(op: str) -> Callable[[Event, Sequence[Event], Sequence[Event]], float | None]:
    def find(fault: Event, _: Sequence[Event], later: Sequence[Event]) -> float | None:
        return next((e["t"] - fault["t"] for e in later if e["op"] == op and _is_done(e)), None)

    return find


def _is_done(event: Event) -> bool:
    return bool(event.get("phase") != "call" and event.get("reply", ["OK"])[0] == "OK")


RESUMED = {
    "worker": _worker,
    "trainer": _next("delivered"),
    "producer": _next("enqueue"),
    SERVER: _next("submit"),
}
