"""The oracle must find what is planted into records of a good run, and nothing in these."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from proofs.chaos.history import Event
from proofs.truth.oracle import Oracle, Verdict
from proofs.truth.witness import digest, members_of, pieces, score_of

GID = "sums-0000000003"
PROMPT = np.arange(5, dtype="<i4")
FIRST, SECOND = VersionSpan(0, 4, 0, "a"), VersionSpan(6, 3, 1, "b")
"""Two calls of the engine; between them the model read two tokens."""


def group() -> RolloutGroup:
    """Two rollouts of nine tokens each."""
    states = []
    for index in range(2):
        dice = np.random.default_rng(index)
        ids = dice.integers(4, 90, 9, dtype="<i4")
        states.append(
            RolloutState(
                index=index,
                prompt_ids=PROMPT,
                response_ids=ids,
                logprobs=np.where(np.isin(np.arange(9), (4, 5)), 0, -dice.random(9)).astype("<f4"),
                response_mask=[1, 1, 1, 1, 0, 0, 1, 1, 1],
                spans=[FIRST, SECOND],
                reward={"score": score_of(ids)},
                status=Status.COMPLETED,
            )
        )
    return RolloutGroup(GID, "sums", states)


def records() -> list[Event]:
    """Records of a run that trained `group` as it was sampled."""
    events: list[Event] = []
    for state in group().states:
        sequence = np.concatenate([PROMPT, state.response_ids])
        for span, ended in ((FIRST, False), (SECOND, True)):
            start = span.start
            made = pieces(
                sequence, state.logprobs[start:], [span._replace(start=0)], len(PROMPT) + start
            )
            events.append(
                {"op": "made", "gid": GID, "member": state.index, "pieces": made, "ended": ended}
            )
    events.append({"op": "batch", "step": 1, "rank": 0, "groups": {GID: 2}})
    members = [*members_of(group())]
    scores = [member["score"] for member in members]
    for number, member in enumerate(members):
        member["advantages"] = [float(np.float32(scores[number] - scores[1 - number]))]
        events.append({"op": "loss", "step": 1, "rank": 0, "micro": number, "members": [member]})
    return events


def judge(events: list[Event]) -> Verdict:
    return Oracle(events, lambda _: digest(PROMPT)).judge()


def test_good_records_are_clean() -> None:
    verdict = judge(records())
    assert not verdict.faults, str(verdict)
    assert (verdict.groups, verdict.micro_batches) == (1, 2)


Members = list[dict[str, Any]]
Plant = Callable[[Members], None]
OTHER = digest(PROMPT)


def put(value: Any, *path: str | int) -> Plant:
    """Write a value into the record of the first member."""

    def plant(members: Members) -> None:
        node: Any = members[0]
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = value

    return plant


def swap(name: str) -> Plant:
    def plant(members: Members) -> None:
        members[0][name], members[1][name] = members[1][name], members[0][name]

    return plant


def use_other_content_later(members: Members) -> None:
    members[1] |= {"gid": members[0]["gid"], "member": members[0]["member"]}


PLANTED: dict[str, tuple[Plant, str]] = {
    "another prompt": (put(digest(PROMPT[1:]), "prompt"), "prompt"),
    "swapped tokens": (swap("pieces"), "tokens"),
    "another token": (put(OTHER, "pieces", 1, 5), "tokens"),
    "another token that was read": (put(OTHER, "pieces", 1, 4), "tokens before"),
    "another logprob": (put(OTHER, "pieces", 0, 6), "logprobs"),
    "other weights": (put(7, "pieces", 0, 2), "version"),
    "another lineage": (put("c", "pieces", 0, 3), "lineage"),
    "read tokens trained": (put([[0, 9, 1.0]], "mask"), "mask"),
    "garbage in the mask": (put(57.0, "mask", 0, 2), "mask"),
    "a lost call": (lambda members: members[0]["pieces"].pop(), "end"),
    "a cut response": (put(8, "tokens"), "end"),
    "another reward": (put(9.75, "reward"), "reward"),
    "swapped advantages": (swap("advantages"), "advantage"),
    "other targets": (put(False, "is_predicted"), "targets"),
    "a rollout left out": (put(5, "member"), "missing"),
    "other content later": (use_other_content_later, "again"),
}


@pytest.mark.parametrize(("plant", "kind"), PLANTED.values(), ids=PLANTED)
def test_what_is_planted_is_found(plant: Plant, kind: str) -> None:
    events = deepcopy(records())
    plant([event["members"][0] for event in events if event["op"] == "loss"])
    assert kind in {fault.kind for fault in judge(events).faults}
