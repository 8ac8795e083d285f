"""Which results were accepted, and generated again all the same."""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.history import CLAIMED, Event


def lost_results(events: Sequence[Event], surely_fresh: int) -> list[str]:
    """A line for each result that was accepted a second time before it can have become too old.

    That is `surely_fresh` steps after its claim at the earliest; or at once, when a trainer forks
    away from the weights that it was made with. Claims alone prove nothing: who was stopped writes
    down later what it was answered.
    """
    lost = []
    taken = 0
    begun: dict[str, int] = {}
    accepted: dict[str, str] = {}
    for event in events:
        if event["op"] in ("opened", "trainer_open"):
            accepted.clear()
        elif event["op"] == "delivered":
            taken = max(taken, event["step"])
        elif event["op"] == "claim":
            for gid in event["reply"][CLAIMED]:
                begun.setdefault(gid, taken)
        elif event["op"] == "submit" and _is_accepted(event):
            gid, token = event["args"]["gid"], event["args"]["token"]
            if accepted.get(gid, token) != token:
                if taken - begun.get(gid, 0) < surely_fresh:
                    lost.append(f"{gid} was accepted, and again from {event['who']}")
                begun[gid] = taken
            accepted[gid] = token
    return lost


def _is_accepted(event: Event) -> bool:
    return bool(
        event["phase"] == "ok"
        and event["reply"][0] == "OK"
        and event["args"].get("status") == "completed"
    )
