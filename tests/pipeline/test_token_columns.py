from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from buffer.curation.rollout_line import RolloutLine, group_of, lines_of
from buffer.errors import JudgeError
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status
from consumer.grpo.policy.micro_batch import Packer
from consumer.handle.batch import BatchTable
from producer_workers.judges.judge import take_columns
from producer_workers.user_code.border import check_answer
from rolloutmq.testing import rehearse

PROBLEMS = [{"question": f"{n} + {n} = ?", "answer": str(2 * n)} for n in range(3)]


def steps(*, response: str, ground_truth: str, state: Any) -> dict[str, Any]:
    ids = state.response_ids
    answer = {"score": float(state.index), "token_rewards": ids / 8}
    if state.index % 2:
        answer["teacher_logprobs"] = {"large": -ids / 4, "small": [-2.0] * len(ids)}
    return answer


def written(line: dict[str, Any]) -> bytes:
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)


@pytest.mark.parametrize("judge", [steps, f"{__name__}:steps"], ids=["here", "in a process"])
def test_a_judges_token_columns_reach_the_micro_batches(judge: str | Callable[..., Any]) -> None:
    groups = rehearse(PROBLEMS, judge=judge, samples=4)
    exported = [list(lines_of(group, "batch", 0)) for group in groups]
    lines = [[RolloutLine.model_validate_json(written(line)) for line in of] for of in exported]
    imported = [group_of(of, group.gid, "t") for of, group in zip(lines, groups, strict=True)]
    for batch in (groups, imported):
        table = BatchTable.of(batch)
        packed = Packer(64).pack_pad_dispatch(table)
        assert len(packed) > 1
        for part in packed:
            has_teachers = (part.rollout[part.sample] % 4) % 2 == 1
            nan = torch.full_like(part.rollout_logprobs, torch.nan)
            expected = {
                "token_rewards": part.targets / 8,
                "teacher_logprobs/large": torch.where(has_teachers, -part.targets / 4, nan),
                "teacher_logprobs/small": torch.where(has_teachers, -2.0, nan),
                "values": nan,
            }
            for name, column in expected.items():
                assert torch.equal(part.column(name).nan_to_num(9), column.nan_to_num(9)), name
        assert sum(len(part.rollout) for part in packed) == 12


def test_roles_and_segments_are_exported_and_imported() -> None:
    facts = [(0, "s/a", "a"), (0, "s/b", "b"), (0, "s/b", "b"), (1, "t/a", "a")]
    states = [
        RolloutState(
            index=index,
            session_id=session,
            role=role,
            response_ids=np.arange(3),
            logprobs=[0, 0, 0],
            reward={"score": 1},
            status=Status.COMPLETED,
        )
        for index, session, role in facts
    ]
    group = RolloutGroup("math-0000000001", "math", states)
    lines = [RolloutLine.model_validate_json(written(line)) for line in lines_of(group, "batch", 0)]
    imported = group_of(lines, group.gid, group.task)
    assert [(state.index, state.session_id, state.role) for state in imported.states] == facts
    assert imported.sessions == group.sessions


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"token_rewards": [1.0]}, "1 token_rewards for 2 response tokens"),
        ({"token_rewards": [1.0, float("nan")]}, "token_rewards"),
        ({"token_rewards": "ab"}, "token_rewards"),
        ({"token_rewards": [[1.0], [2.0]]}, "token_rewards"),
        ({"teacher_logprobs": [0.0, 0.0]}, "teacher_logprobs"),
        ({"teacher_logprobs": {"large": [0.0]}}, "1 teacher_logprobs of 'large' for 2"),
        ({"values": [1e39, 0.0]}, "values"),
        ({"turn_rewards": [1.0, 1.0]}, "2 turn_rewards for 1 turns"),
    ],
)
def test_columns_that_do_not_fit_the_response_fail_the_rollout(
    columns: dict[str, Any], said: str
) -> None:
    state = RolloutState(response_ids=np.arange(2), logprobs=[0, 0])
    with pytest.raises(JudgeError, match=said):
        take_columns("mine", [state], [check_answer("mine", {"score": 1, **columns})])


def test_a_judge_rewards_turns_at_their_last_tokens() -> None:
    ids = np.arange(6)
    state = RolloutState(response_ids=ids, logprobs=-ids, response_mask=[1, 1, 0, 1, 1, 0])
    for _ in range(2):  # a judge that is asked again gives nothing twice
        answer = check_answer("mine", {"score": 1, "turn_rewards": [2, -1]})
        assert take_columns("mine", [state], [answer]) == [{"score": 1.0}]
    assert state.token_rewards is not None
    assert state.token_rewards.tolist() == [0, 2, 0, 0, -1, 0]


def test_a_number_with_the_name_of_a_column_is_part_of_the_reward() -> None:
    answer = check_answer("mine", {"score": 1, "values": 0.5})
    assert take_columns("mine", [RolloutState()], [answer]) == [{"score": 1.0, "values": 0.5}]
