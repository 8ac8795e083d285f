from __future__ import annotations

import numpy as np
import orjson
import pytest

from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from consumer.handle.sample_log import TokenTexts, describe_sample
from consumer.handle.sample_tokens import pack, unpack, without_tokens


def make_group(lengths: list[int]) -> RolloutGroup:
    states = []
    for index, length in enumerate(lengths):
        state = RolloutState(index=index, prompt_ids=[1, 2])
        ids = np.arange(10 * index, 10 * index + length, dtype="<i4")
        logprobs = (-np.arange(length) / 3).astype("<f4")
        state.append(ids, logprobs, [VersionSpan(0, length, 0, "l0")])
        state.status = Status.COMPLETED
        states.append(state)
    return RolloutGroup("math-0000000001", "math", states)


@pytest.mark.parametrize("most", [1, 3, 100])
def test_the_numbers_of_the_first_tokens_come_back_rounded(most: int) -> None:
    group = make_group([4, 0, 2, 7])
    scores = {
        "trainer": group.logprobs - 0.25,
        "entropy": np.where(group.response_ids < 20, 0.5, np.nan).astype("<f4"),
    }
    packed = pack(scores, group.lengths, most)
    line = describe_sample(group, 1, "best", 0, TokenTexts([]), tokens=most, scores=packed)
    sample = unpack(orjson.loads(orjson.dumps(line)))
    for member, state in zip(sample["members"], group.states, strict=True):
        kept = state.response_ids[:most]
        assert member["response_ids"] == kept.tolist()
        assert member["response_mask"] == [1] * len(kept)
        assert member["logprobs"] == pytest.approx(state.logprobs[:most].tolist(), abs=2e-3)
        assert member["trainer_logprobs"] == pytest.approx(
            (state.logprobs[:most] - 0.25).tolist(), abs=2e-3
        )
        expected = [0.5 if token < 20 else np.nan for token in kept.tolist()]
        assert member["entropy"] == pytest.approx(expected, nan_ok=True)
    assert without_tokens(line) == describe_sample(group, 1, "best", 0, TokenTexts([]))
