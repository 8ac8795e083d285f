"""The oracle must find what is planted into records of a good run, and nothing in these."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from tests.chaos.history import Event
from tests.truth.oracle import Oracle, Verdict
from tests.truth.witness import digest, members_of, pieces, score_of

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


def swap_prompts(members: Members) -> None:
    members[0]["prompt"] = digest(PROMPT[1:])


def swap_tokens(members: Members) -> None:
    members[0]["pieces"], members[1]["pieces"] = members[1]["pieces"], members[0]["pieces"]


def overwrite_a_token(members: Members) -> None:
    members[0]["pieces"][1][5] = digest(PROMPT)


def overwrite_what_was_read(members: Members) -> None:
    members[0]["pieces"][1][4] = digest(PROMPT)


def overwrite_a_logprob(members: Members) -> None:
    members[0]["pieces"][0][6] = digest(PROMPT)


def stamp_other_weights(members: Members) -> None:
    members[0]["pieces"][0][2] = 7


def stamp_another_lineage(members: Members) -> None:
    members[0]["pieces"][0][3] = "c"


def train_what_was_read(members: Members) -> None:
    members[0]["mask"] = [[0, 9, 1.0]]


def mask_with_garbage(members: Members) -> None:
    members[0]["mask"][0][2] = 57.0


def lose_a_call(members: Members) -> None:
    members[0]["pieces"].pop()


def cut_a_response(members: Members) -> None:
    members[0]["tokens"] -= 1


def pay_another_reward(members: Members) -> None:
    members[0]["reward"] += 0.25


def swap_advantages(members: Members) -> None:
    members[0]["advantages"], members[1]["advantages"] = (
        members[1]["advantages"],
        members[0]["advantages"],
    )


def predict_other_tokens(members: Members) -> None:
    members[0]["is_predicted"] = False


def leave_a_rollout_out(members: Members) -> None:
    members[0]["member"] = 5


def use_other_content_later(members: Members) -> None:
    members[1] |= {"gid": members[0]["gid"], "member": members[0]["member"]}


PLANTED: dict[Callable[[Members], None], str] = {
    swap_prompts: "prompt",
    swap_tokens: "tokens",
    overwrite_a_token: "tokens",
    overwrite_what_was_read: "tokens before",
    overwrite_a_logprob: "logprobs",
    stamp_other_weights: "version",
    stamp_another_lineage: "lineage",
    train_what_was_read: "mask",
    mask_with_garbage: "mask",
    lose_a_call: "end",
    cut_a_response: "end",
    pay_another_reward: "reward",
    swap_advantages: "advantage",
    predict_other_tokens: "targets",
    leave_a_rollout_out: "missing",
    use_other_content_later: "again",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_found(plant: Callable[[Members], None]) -> None:
    events = deepcopy(records())
    plant([event["members"][0] for event in events if event["op"] == "loss"])
    assert PLANTED[plant] in {fault.kind for fault in judge(events).faults}
