"""Which results were accepted, and generated again all the same."""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.history import CLAIMED, Event


def lost_results(events: Sequence[Event], surely_fresh: int) -> list[str]:
    """A line for each result that was claimed again before it can have become too old.

    That is `surely_fresh` steps after its claim at the earliest; or at once, when a trainer forks
    away from the weights that it was made with.
    """
    lost = []
    taken = 0
    begun: dict[str, int] = {}
    accepted: set[str] = set()
    for event in events:
        if event["op"] == "opened":
            accepted.clear()
        elif event["op"] == "delivered":
            taken = max(taken, event["step"])
        elif event["op"] == "submit" and _is_accepted(event):
            accepted.add(event["args"]["gid"])
        elif event["op"] == "claim":
            for gid in event["reply"][CLAIMED]:
                if gid in accepted and taken - begun[gid] < surely_fresh:
                    lost.append(f"{gid} was accepted, and claimed again by {event['who']}")
                begun[gid] = taken if gid in accepted else begun.get(gid, taken)
                accepted.discard(gid)
    return lost


def _is_accepted(event: Event) -> bool:
    return bool(
        event["phase"] == "ok"
        and event["reply"][0] == "OK"
        and event["args"].get("status") == "completed"
    )
