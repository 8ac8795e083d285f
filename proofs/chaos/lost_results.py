"""Which results were accepted, and generated again all the same."""

from __future__ import annotations

from collections.abc import Sequence

from proofs.chaos.history import CLAIMED, Event

Claim = tuple[str, str]
"""(gid, token)"""


def lost_results(events: Sequence[Event], surely_fresh: int) -> list[str]:
    """A line for each result that was accepted a second time before it can have become too old.

    That is `surely_fresh` steps after its claim at the earliest; or at once, when a trainer opened
    after its claim and forked away from the weights that it was made with. Claims alone prove
    nothing: a process that was stopped writes down later what it was answered.
    """
    lost = []
    taken = 0
    begun: dict[Claim, int] = {}
    forked: set[Claim] = set()
    accepted: dict[str, Claim] = {}
    for event in events:
        if event["op"] in ("opened", "trainer_open"):
            accepted.clear()
            forked |= begun.keys()
        elif event["op"] == "delivered":
            taken = max(taken, event["step"])
        elif event["op"] == "claim":
            for gid in event["reply"][CLAIMED]:
                begun.setdefault((gid, event["args"]["token"]), taken)
        elif event["op"] == "submit" and _is_accepted(event):
            claim = event["args"]["gid"], event["args"]["token"]
            if claim in forked:
                continue
            before = accepted.get(claim[0], claim)
            if before != claim and taken - begun.get(before, 0) < surely_fresh:
                lost.append(f"{claim[0]} was accepted, and again from {event['who']}")
            accepted[claim[0]] = claim
    return lost


def _is_accepted(event: Event) -> bool:
    return bool(
        event["phase"] == "ok"
        and event["reply"][0] == "OK"
        and event["args"].get("status") == "completed"
    )
