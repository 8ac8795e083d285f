"""Whether the content of batches is what engines and judges made, and stays so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from proofs.chaos.history import Event
from proofs.truth.oracle import Oracle, PromptOf

ByOp = Mapping[str, Sequence[Event]]
"""Events by their `op`."""


def differences(by_op: ByOp, prompt_of: PromptOf) -> Iterator[str]:
    """Yield a line for each rollout that was delivered with other tokens, logprobs, mask, versions or reward than were
    made, and what differs.
    """
    oracle = Oracle(by_op["made"], prompt_of)
    for event in by_op["delivered"]:
        for group in event["groups"]:
            for member in group.get("members", ()):
                place = f"{group['gid']} member {member['member']} in step {event['step']}"
                for kind, text in oracle.of_member(member):
                    yield f"{place}: {kind}: {text}"


def changes(by_op: ByOp) -> Iterator[str]:
    """Yield a line for each batch that changed in the trainer's memory while the next one was read."""
    delivered: dict[tuple[str, int], tuple[Any, ...]] = {}
    for event in sorted([*by_op["delivered"], *by_op["held"]], key=itemgetter("t")):
        key = (event["lineage"], event["step"])
        if event["op"] == "delivered":
            delivered[key] = content_of(event)
        elif content_of(event) != delivered[key]:
            yield f"step {event['step']} has changed since it was delivered"


def content_of(event: Event) -> tuple[Any, ...]:
    return tuple((group["gid"], group["digest"]) for group in event["groups"])
