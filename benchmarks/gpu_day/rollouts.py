"""Groups of random tokens, as a trainer gets them from the queue."""

from __future__ import annotations

import numpy as np

from buffer.ids import group_id
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan

MEMBERS = 8


def random_groups(count: int, prompt: int, response: int, vocabulary: int) -> list[RolloutGroup]:
    """Return `count` groups of 8 rollouts, of `prompt` and at most `response` random tokens each.

    Lengths are spread evenly from half of `response` to all of it; half of the rollouts score 1.
    """
    draw = np.random.default_rng(1)
    return [_group(draw, number, prompt, response, vocabulary) for number in range(count)]


def _group(
    draw: np.random.Generator, number: int, prompt: int, response: int, vocabulary: int
) -> RolloutGroup:
    ids = draw.integers(0, vocabulary, prompt).astype("<i4")
    states = []
    for index in range(MEMBERS):
        length = response // 2 + response // 2 * index // (MEMBERS - 1)
        state = RolloutState(index=index, prompt_ids=ids, messages=[])
        state.append(
            draw.integers(0, vocabulary, length).astype("<i4"),
            np.full(length, -np.log(vocabulary), "<f4"),
            [VersionSpan(0, length, 0, "main")],
        )
        state.status = Status.COMPLETED
        state.finish_reason = "stop"
        state.reward = {"score": float(index % 2)}
        states.append(state)
    return RolloutGroup(group_id("math", number), "math", states)
