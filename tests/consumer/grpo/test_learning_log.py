"""A real trainer whose judge gives nothing: said once in its log, and shown by every view."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.limits import TaskLimits
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion
from consumer.grpo.trainer import Trainer
from consumer.handle.sample_log import SampleLog
from consumer.handle.step_log import read_steps
from rolloutmq.views.explain.learning import learning
from rolloutmq.web.report import read_contents
from tests.consumer.grpo.training_config import GROUPS, training_config
from tests.consumer.handle import crew
from tests.consumer.handle.crew import answer

STEPS = 12


def unrewarded(group: RolloutGroup, weights: PolicyVersion) -> RolloutGroup:
    states = answer(group, weights).states
    for state in states:
        state.reward = {"score": 0.0}
    return group.continued(states)


def test_a_judge_that_gives_nothing_is_named_with_groups_that_can_be_shown(
    make_run: Callable[..., Run],
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = make_run(steps=STEPS, tasks={"math": TaskLimits()})
    plan = {"steps": STEPS, "batch_size": GROUPS}
    config = training_config(run.name, tmp_path / "run", plan=plan)
    folder = config.run.folder
    folder.mkdir()
    monkeypatch.setattr(crew, "answer", unrewarded)
    with crew.at_work(run, stamp=0, math=STEPS * GROUPS), caplog.at_level(logging.INFO):
        assert Trainer(run, config, model_dir).fit()
    said = [vars(record)["finding"] for record in caplog.records if "finding" in vars(record)]
    assert said == ["learning/equal_rewards"]
    (symptom,) = learning(folder, read_steps(folder))
    assert (symptom.name, symptom.level) == ("learning/equal_rewards", "warning")
    logged = [sample["gid"] for sample in SampleLog(folder).read(STEPS)]
    assert set(symptom.look) >= set(logged)
    assert logged
    (shown,) = read_contents(folder)["findings"]
    assert shown["name"] == "learning/equal_rewards"
