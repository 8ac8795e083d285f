from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from buffer.wire import group_bytes
from buffer.wire.document import STATUSES
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import MediaRef, Status
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.batch_filter import BatchFilter
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy.policy import Policy
from tests.consumer.grpo.models.tiny import make_group


def without_score() -> RolloutGroup:
    group = make_group(50)
    group.states[2].reward = None
    return RolloutGroup(group.gid, group.task, group.states)


def torn() -> RolloutGroup:
    group = make_group(51)
    group.columns["logprobs"] = group.logprobs[:-1]
    return group


def promptless() -> RolloutGroup:
    group = make_group(52)
    group.columns["prompt_ids"] = np.empty(0, "<i4")
    return group


def showing() -> RolloutGroup:
    group = make_group(53)
    group.shared.multimodal = [MediaRef("image", "images/0.png")]
    return group


def failed() -> RolloutGroup:
    group = make_group(54)
    group.columns["statuses"][1] = STATUSES.index(Status.FAILED)
    return group


def make_controller(model_dir: Path, batch_filter: BatchFilter | None = None) -> TrainController:
    learner = Policy(model_dir, LearnerConfig(learning_rate=1e-3), seed=7)
    return TrainController(learner, batch_filter=batch_filter)


def test_groups_that_cannot_be_trained_are_named_and_change_nothing_of_the_others(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [make_group(i, prompt=3 + i) for i in range(3)]
    mixed = [good[0], without_score(), good[1], failed(), torn(), promptless(), showing(), good[2]]
    clean = make_controller(model_dir)
    dirty = make_controller(model_dir)
    with caplog.at_level(logging.WARNING):
        metrics = dirty.fit(mixed)
    expected = clean.fit(good)
    counts = {name: metrics.pop(name) for name in list(metrics) if name.startswith("filtered/")}
    assert {name: value for name, value in counts.items() if value} == {
        "filtered/not_completed": 1, "filtered/missing_reward": 1, "filtered/length_mismatch": 1,
        "filtered/no_prompt": 1, "filtered/multimodal": 1,
    }  # fmt: skip
    assert metrics == {
        name: value for name, value in expected.items() if not name.startswith("filtered/")
    }
    assert {record.__dict__["gid"] for record in caplog.records} == {
        f"task-{n:010d}" for n in (50, 51, 52, 53, 54)
    }
    assert "rollouts [2] have no score" in caplog.text


def test_overlong_rollouts_are_masked_and_their_scores_still_count(model_dir: Path) -> None:
    received = group_bytes.decode(group_bytes.encode(make_group(3, prompt=4, lengths=(3, 9, 2, 4))))
    controller = make_controller(model_dir, BatchFilter(10))
    metrics = controller.fit([received])
    assert metrics["filtered/overlong"] == 1
    assert received.mask[3:12].sum() == 0
    assert received.mask[:3].any()
    assert len(controller.advantages) == 4  # all four were compared
    again = controller.fit([received])  # delivered again: the same is left out, and no more
    assert again["filtered/overlong"] == 1


def test_truncated_rollouts_are_masked_only_where_that_is_asked_for() -> None:
    states = make_group(4).states
    states[1].finish_reason = "length"
    group = RolloutGroup("math-0000000004", "math", states)
    assert BatchFilter().apply([group]).counts == {}
    usable = BatchFilter(mask_truncated=True).apply([group])
    assert usable.counts == {"truncated": 1}
    assert usable.groups == [group]
    assert group.mask[3:8].sum() == 0


def test_a_batch_of_which_nothing_is_left_is_a_step_that_moves_nothing(model_dir: Path) -> None:
    controller = make_controller(model_dir)
    before = {name: tensor.clone() for name, tensor in controller.state_tensors().items()}
    assert controller.fit([without_score()])["filtered/missing_reward"] == 1
    after = controller.state_tensors()
    assert all((tensor == after[name]).all() for name, tensor in before.items())
