"""What a report says of a run, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proofs.chaos.checker import Checker


def figures(checker: Checker, problems: Mapping[str, list[str]]) -> dict[str, Any]:
    """Times in seconds."""
    submits = [e for e in checker.by_op["submit"] if e["phase"] == "ok"]
    steps = Counter(event["step"] for event in checker.by_op["delivered"])
    progress = [e["t"] for e in checker.events if e["op"] in ("delivered", "trained")]
    progress += [e["t"] for e in submits if e["reply"][0] == "OK"]
    return {
        "operations": sum(1 for e in checker.events if e.get("phase") == "ok"),
        "groups_acknowledged": len(checker.entered),
        "groups_trained": sum(len(event["gids"]) for event in checker.surviving),
        "rollouts_compared": sum(
            len(group.get("members", ()))
            for event in checker.by_op["delivered"]
            for group in event["groups"]
        ),
        "rollouts_in_pieces": sum(
            len(member["pieces"]) > 1
            for event in checker.by_op["delivered"]
            for group in event["groups"]
            for member in group.get("members", ())
        ),
        "steps": len(checker.surviving),
        "lost": sum(" is nowhere" in text for text in problems["lost or doubled"]),
        "doubled": len(problems["trained twice"])
        + sum(" and " in text for text in problems["lost or doubled"]),
        "results_lost": len(checker.results_lost),
        "failovers": len(checker.by_op["loss"]),
        "fenced": sum(1 for e in submits if e["reply"][0] == "FENCED"),
        "redelivered": sum(n - 1 for n in steps.values()),
        "openings": len(checker.forks),
        "faults": len(checker.by_op["fault"]),
        "faults_by_kind": dict(Counter(e["kind"] for e in checker.by_op["fault"]).most_common()),
        "at_the_end": dict(
            Counter(found[0] for found in checker.final["stages"].values()).most_common()
        ),
        "longest_stall_s": round(_longest_gap(sorted(progress)), 2),
    }


def _longest_gap(times: Sequence[float]) -> float:
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)
