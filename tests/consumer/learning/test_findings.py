from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from consumer.config.trainer import LearningFinding, TrainerSection
from consumer.handle.step_log import (
    Evaluations,
    StepWriter,
    TrainedStep,
    read_evaluations,
    read_steps,
)
from consumer.learning.checks import SLOWER
from consumer.learning.findings import ENDED, LearningLog, findings

RUNS = Path(__file__).parent / "runs"
"""Small real runs, which `tests.consumer.learning.small_runs` recorded."""

FAULTS = {
    "zero": {"equal_rewards"},
    "ones": {"equal_rewards"},
    "untrained": {"equal_rewards", "response_limit"},
    "few-groups": {"no_advantage"},
    "collapse": {"same_response"},
    "eights": {"same_response", "looping"},
    "exploited": {"same_response", "held_out_falls"},
    "form": {"looping", "one_part"},
    "drift": {"judge_disagreement", "entropy_collapse"},
    "rambling": {"entropy_explosion"},
    "clipped": {"gradient_clipped"},
    "wrong-engine": {"mismatch"},
    "many-updates": {"same_response"},
    "too-stale": {"mismatch", "no_advantage"},
    "broken-engine": {"mismatch"},
    "coin": {"judge_disagreement"},
    "huge-rate": {"equal_rewards"},
    "sums-fast": {"no_advantage"},
    "small-batch": {"no_advantage"},
    "growing": {"length_without_reward"},
    "overflow": {"gradient_not_finite"},
    "late": {"policy_jump"},
    "masked": {"no_gradient"},
    "cut": {"length_bias"},
    "by-heart": {"held_out_falls"},
    "demo-fast": {"mismatch", "reward_falls"},
    "one-constant": {"equal_rewards"},
}
"""What is found after the last step."""

HEALTHY = sorted(file.stem for file in (RUNS / "healthy").glob("*.json"))


def recorded(name: str) -> tuple[list[TrainedStep], Evaluations]:
    run = orjson.loads(next(RUNS.glob(f"*/{name}.json")).read_bytes())
    steps = [
        TrainedStep(
            step,
            "",
            (run["gid"],),
            {name: values[n] for name, values in run["metrics"].items() if values[n] is not None},
        )
        for n, step in enumerate(run["steps"])
    ]
    return steps, {
        (task, int(step)): metrics
        for task, points in run["evaluations"].items()
        for step, metrics in points.items()
    }


def while_it_ran(name: str) -> list[set[str]]:
    """Return the names of what is found after each step, but for notes."""
    steps, evaluations = recorded(name)
    found = []
    for n in range(1, len(steps) + 1):
        known = {key: value for key, value in evaluations.items() if key[1] <= steps[n - 1].step}
        shown = findings(steps[:n], known)
        found.append({each.name.partition("/")[2] for each in shown if each.level != "note"})
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_with_a_fault_is_explained(name: str) -> None:
    found = while_it_ran(name)
    assert found[-1] == FAULTS[name]
    shown = findings(*recorded(name))
    assert all(each.fix and each.look and 0 <= each.since <= len(found) for each in shown)


@pytest.mark.parametrize(
    ("name", "step", "finding", "what", "fix"),
    [
        ("zero", 20, "equal_rewards", "are 0 for 20 steps: ", "does the judge read"),
        ("huge-rate", 40, "equal_rewards", "for 39 steps (before, 0.22)", SLOWER),
        ("one-constant", 24, "equal_rewards", "of task constant are 0.5 for", "harder prompts"),
        ("few-groups", 40, "no_advantage", "96% of the groups", "prompts of medium difficulty"),
        ("sums-fast", 40, "no_advantage", "at first 25%", SLOWER),
        ("wrong-engine", 40, "mismatch", "at a staleness of 0.0", "the same dtype"),
        ("demo-fast", 10, "mismatch", "at a staleness of 0.9", SLOWER),
        ("demo-fast", 40, "reward_falls", "from 0.28 to 0.06", SLOWER),
        ("cut", 30, "length_bias", "lost most often: truncated", "set mask_truncated = false"),
        ("overflow", 12, "gradient_not_finite", "1 in each", "if all are: the loss overflows"),
    ],
)
def test_a_finding_names_its_cause(name: str, step: int, finding: str, what: str, fix: str) -> None:
    """A rate that is too high is no difficulty of the prompts, and no other dtype."""
    steps, evaluations = recorded(name)
    found = findings(steps[:step], evaluations)
    (own,) = [each for each in found if each.name == f"learning/{finding}"]
    assert what in own.what
    assert own.fix.startswith(fix)


def test_a_reward_that_only_varies_has_not_fallen() -> None:
    """Of few groups whose difficulty differs, and of a task that is solved in 2 of 100 tries."""
    draw = np.random.default_rng(0)
    for mean, groups in ((0.3, 8), (0.02, 64), (0.9, 8)):
        for _ in range(10):
            difficulty = draw.beta(2 * mean, 2 - 2 * mean, (300, groups))
            rewards = (draw.binomial(8, difficulty) / 8).mean(axis=1)
            steps = [TrainedStep(n, "", (), {"rewards/mean": r}) for n, r in enumerate(rewards)]
            assert not any(findings(steps[:last], {}) for last in range(15, 300, 5))


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(name: str) -> None:
    assert not set().union(*while_it_ran(name))


def test_a_gradient_of_zero_is_an_effect_of_equal_rewards_or_a_finding() -> None:
    metrics = {"optim/grad_norm": 0.0, "reward_range/math": 1.0, "rewards/mean": 0.5}
    steps = [TrainedStep(n, "", (), metrics) for n in range(1, 12)]
    assert [each.name for each in findings(steps, {})] == ["learning/no_gradient"]
    equal = [TrainedStep(n, "", (), metrics | {"reward_range/math": 0.0}) for n in range(1, 12)]
    assert [each.name for each in findings(equal, {})] == ["learning/equal_rewards"]


def test_responses_that_grow_without_a_reward_are_found_and_with_one_are_not() -> None:
    def run(gain: float) -> list[TrainedStep]:
        return [
            TrainedStep(
                n,
                "",
                (),
                {
                    "response_len/mean": 40.0 + n + n % 3,
                    "rewards/mean": 0.3 + gain * n + 0.02 * (n % 5),
                },
            )
            for n in range(1, 61)
        ]

    assert [each.name for each in findings(run(0.0), {})] == ["learning/length_without_reward"]
    assert findings(run(0.005), {}) == []


def test_skipped_updates_are_found_until_five_steps_have_none() -> None:
    def found(skipped: list[float]) -> list[str]:
        steps = [
            TrainedStep(n, "", (), {"optim/skipped_updates": each})
            for n, each in enumerate(skipped)
        ]
        return [each.name for each in findings(steps, {})]

    assert found([0.0] * 12) == found([1.0, *[0.0] * 12]) == []
    assert found([*[0.0] * 9, 1.0, 0.0, 0.0]) == ["learning/gradient_not_finite"]


def test_a_kl_of_single_steps_far_above_the_others_is_a_jump() -> None:
    kl = [0.004 + 0.002 * (n % 3) for n in range(40)]
    steps = [TrainedStep(n, "", (), {"policy/kl_old": each}) for n, each in enumerate(kl, start=1)]
    assert findings(steps, {}) == []
    steps[34] = TrainedStep(35, "", (), {"policy/kl_old": 0.9})
    (found,) = findings(steps, {})
    assert (found.name, found.since) == ("learning/policy_jump", 35)
    assert "rolloutmq batch 35" in found.look


NAMES = sorted({
    *(name for run in (*FAULTS, *HEALTHY) for step in recorded(run)[0] for name in step.metrics),
    *("reward_part/a/b", "reward_part/", "length_bias/mean/a", "length_bias/no_advantage/a"),
})  # fmt: skip
VALUES = st.floats() | st.sampled_from([0.0, 1.0, math.nan, math.inf, 1e308, -1e308])
ANY_STEPS = st.lists(
    st.tuples(
        st.integers(0, 300), st.lists(st.text(max_size=12)), st.dictionaries(st.sampled_from(NAMES), VALUES)
    ),
    max_size=60,
)  # fmt: skip


@given(
    ANY_STEPS,
    st.dictionaries(
        st.tuples(st.text(max_size=3), st.integers(0, 300)),
        st.dictionaries(st.sampled_from(["eval/accuracy", "eval/groups"]), VALUES),
    ),
    st.sampled_from([1, 12, 40]),
)
def test_no_metrics_make_a_check_fail(
    rows: list[tuple[int, list[str], dict[str, float]]], evaluations: Any, times: int
) -> None:
    steps = [TrainedStep(n, "", tuple(gids), metrics) for n, gids, metrics in rows * times]
    for each in findings(steps, evaluations):
        assert each.name in get_args(LearningFinding)
        assert each.what


def test_a_silenced_finding_is_neither_shown_nor_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silence = TrainerSection(silence=("learning/equal_rewards", "learning/no_gradient")).silence
    written = LearningLog(tmp_path, silence)
    writer = StepWriter(tmp_path, silence)
    for step in recorded("zero")[0]:
        writer.add_step(step.step, "", [*step.gids], step.metrics)
        written.add_step(step.step, step.gids, step.metrics)
    assert not findings(read_steps(tmp_path), read_evaluations(tmp_path))
    assert not caplog.records
    with pytest.raises(ValidationError, match="learning/entropy_collapse"):
        TrainerSection.model_validate({"silence": ["learning/entropy"]})


def test_a_finding_is_logged_when_it_begins_and_when_it_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer is restarted in between, and trains its last steps again."""
    caplog.set_level(logging.INFO)
    writer, last = StepWriter(tmp_path), recorded("zero")[0]
    healthy = recorded("sums-0")[0]
    log = LearningLog(tmp_path)

    def add(step: int, metrics: dict[str, float]) -> list[str]:
        caplog.clear()
        writer.add_step(step, "", ["sums-0000000001"], metrics)
        log.add_step(step, ["sums-0000000001"], metrics)
        return [record.levelname for record in caplog.records]

    said = [add(step, last[0].metrics) for step in range(1, 16)]
    assert [each for each in said if each] == [["WARNING"]]
    log = LearningLog(tmp_path)
    assert not any(add(step, last[0].metrics) for step in range(12, 18))
    said = [add(step, healthy[step].metrics) for step in range(18, 18 + ENDED + 1)]
    assert [each for each in said if each] == [["INFO"]]
