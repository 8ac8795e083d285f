"""Decides from records alone whether what was trained is what was sampled.

It knows the records of `proofs.truth.witness`, and nothing of the queue between the two sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proofs.chaos.history import Event
from proofs.truth.witness import Content

CLOSE = 1e-5
"""Advantages are computed in float32."""

PromptOf = Callable[[str], str]
"""Digest of the prompt of a gid."""


@dataclass(frozen=True)
class Fault:
    """`where`: step, rank and number of a micro-batch; `kind`: what differs."""

    kind: str
    gid: str
    where: tuple[int, int, int]
    text: str

    def __str__(self) -> str:
        step, rank, micro = self.where
        return f"{self.kind}: {self.gid}{self.text}, step {step}, rank {rank}, micro-batch {micro}"


@dataclass
class Verdict:
    """What was compared, and what differs."""

    faults: list[Fault] = field(default_factory=list)
    groups: int = 0
    micro_batches: int = 0

    @property
    def wrong_groups(self) -> int:
        return len({(fault.gid, fault.where[0]) for fault in self.faults})

    @property
    def wrong_micro_batches(self) -> int:
        return len({fault.where for fault in self.faults})

    def __str__(self) -> str:
        kinds = sorted({fault.kind for fault in self.faults})
        said = [f"{self.wrong_groups} of {self.groups} groups and {self.wrong_micro_batches} of "
                f"{self.micro_batches} micro-batches are wrong: {', '.join(kinds) or 'nothing'}"]  # fmt: skip
        return "\n".join([*said, *map(str, self.faults[:10])])


class Oracle:
    """Compares what trainers used with everything that engines made.

    verdict = Oracle(events, prompt_of).judge()
    """

    def __init__(self, events: Iterable[Event], prompt_of: PromptOf) -> None:
        self._prompt_of = prompt_of
        self._made: dict[tuple[str, int], dict[tuple[Any, ...], bool]] = defaultdict(dict)
        self._used: list[Event] = []
        self._batches: list[Event] = []
        for event in events:
            if event["op"] == "made":
                self._add(event)
            elif event["op"] == "loss":
                self._used.append(event)
            elif event["op"] == "batch":
                self._batches.append(event)

    def _add(self, event: Event) -> None:
        known = self._made[event["gid"], event["member"]]
        for number, piece in enumerate(event["pieces"], 1):
            is_end = number == len(event["pieces"]) and event["ended"]
            known[tuple(piece)] = is_end or known.get(tuple(piece), False)

    def judge(self) -> Verdict:
        verdict = Verdict(micro_batches=len(self._used))
        first: dict[tuple[int, str, int], Content] = {}
        for event in self._used:
            where = (event["step"], event["rank"], event["micro"])
            for member in event["members"]:
                faults = [*self.of_member(member)]
                known = first.setdefault((event["step"], member["gid"], member["member"]), member)
                if _columns(known) != _columns(member):
                    faults.append(("again", "it was other content when it was used before"))
                verdict.faults += [
                    Fault(kind, member["gid"], where, f" member {member['member']}: {text}")
                    for kind, text in faults
                ]
        begun = {(event["step"], gid) for event in self._batches for gid in event["groups"]}
        verdict.groups = len(begun)
        verdict.faults += self._missing()
        verdict.faults += self._advantages()
        return verdict

    def of_member(self, member: Content) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with one rollout, as (kind, text)."""
        gid, begin = member["gid"], member["at"]
        if member["prompt"] != self._prompt_of(gid):
            yield "prompt", "it is not the one that was drawn"
        if not member.get("is_predicted", True):
            yield "targets", "they are not the tokens of the input"
        sampled = []
        is_end = False
        for piece in member["pieces"]:
            known = self._made[gid, member["member"]]
            if tuple(piece) not in known:
                yield self._difference(piece, known)
            is_end = known.get(tuple(piece), True)
            sampled.append((piece[0] - begin, piece[1]))
        if not is_end or not sampled or sum(sampled[-1]) != member["tokens"]:
            yield "end", "the engine did not end the response there"
        if trained_runs(member["mask"]) != joined(sampled):
            yield "mask", f"{member['mask'][:4]} where the engine sampled {joined(sampled)[:4]}"
        if abs(member.get("reward", member["score"]) - member["score"]) > CLOSE:
            yield "reward", f"{member['reward']} for tokens that score {member['score']}"

    @staticmethod
    def _difference(piece: Sequence[Any], known: Iterable[tuple[Any, ...]]) -> tuple[str, str]:
        names = {4: "tokens before", 5: "tokens", 6: "logprobs", 2: "version", 3: "lineage"}
        place = f"[{piece[0]}, {piece[0] + piece[1]})"
        like = [made for made in known if made[:2] == tuple(piece[:2])]
        if not like:
            return "tokens", f"no engine call made {place}"
        nearest = min(like, key=lambda made: sum(made[n] != piece[n] for n in names))
        wrong = [name for n, name in names.items() if nearest[n] != piece[n]]
        return wrong[0], f"{', '.join(wrong)} of {place} are not what the engine made"

    def _missing(self) -> Iterator[Fault]:
        """Every rollout of a batch reaches the loss."""
        used: dict[int, set[tuple[str, int]]] = defaultdict(set)
        for event in self._used:
            used[event["step"]] |= {(each["gid"], each["member"]) for each in event["members"]}
        for event in self._batches:
            wanted = {(gid, n) for gid, k in event["groups"].items() for n in range(k)}
            for gid, member in sorted(wanted - used[event["step"]]):
                where = (event["step"], event["rank"], -1)
                yield Fault("missing", gid, where, f" member {member} was not used")

    def _advantages(self) -> Iterator[Fault]:
        """What the loss multiplies by is the score less the mean of the group's other scores."""
        groups: dict[tuple[int, str], dict[int, tuple[Content, tuple[int, int, int]]]] = (
            defaultdict(dict)
        )
        for event in self._used:
            where = (event["step"], event["rank"], event["micro"])
            for each in event["members"]:
                if "advantages" in each:
                    groups[event["step"], each["gid"]][each["member"]] = (each, where)
        for (_, gid), members in groups.items():
            scores = np.array([each["score"] for each, _ in members.values()])
            others = (scores.sum() - scores) / max(1, len(scores) - 1)
            for (each, where), wanted in zip(members.values(), scores - others, strict=True):
                if any(abs(value - wanted) > CLOSE for value in each["advantages"]):
                    said = f"{each['advantages'][:3]}, {wanted:.5f} by the scores of its tokens"
                    yield Fault("advantage", gid, where, f" member {each['member']}: {said}")


def _columns(member: Content) -> Content:
    """Return what stays the same at each use: advantages are not there at the first one."""
    return {name: value for name, value in member.items() if name != "advantages"}


def trained_runs(mask: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return the runs of a mask that are trained, as (start, length); other values than 0 and 1 as
    runs that no engine can have made.
    """
    return [
        (start, length) if value == 1 else (start, -1) for start, length, value in mask if value
    ]


def joined(parts: Iterable[tuple[int, int]]) -> list[tuple[float, float]]:
    """Return runs, adjacent ones as one."""
    found: list[tuple[float, float]] = []
    for start, length in parts:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found
