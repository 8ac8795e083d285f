from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from buffer.control.control import ControlState, Mode
from buffer.control.progress import Leftovers, ProduceProgress, TaskProgress
from buffer.errors import ConfigError
from buffer.limits import RunLimits, TaskLimits
from buffer.task_mix import Reweighting, TaskMix, newest_parts
from buffer.wire.rollout import PolicyVersion, RolloutState
from producer_workers.producer.strategy import (
    AsyncProduceStrategy,
    ProduceContext,
    SyncProduceStrategy,
    contexts,
    strategies_of,
)
from producer_workers.worker.task_runner import load_sample_filter, not_all_equal
from rolloutmq.config.config import Config
from rolloutmq.config.load import load_config

CONFIG = Path(__file__).with_name("strategy.toml").read_text(encoding="utf-8")


def config(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "mix.toml"
    path.write_text(CONFIG)
    return load_config(path, overrides)


def seen(
    task: str,
    limits: RunLimits,
    *,
    version: int = 0,
    step: int = 1,
    consumed: int = 0,
    completed: int = 0,
    expired: int = 0,
) -> ProduceContext:
    state = ControlState(
        1, Mode.RUN, ("eval", "resume", "fresh"), PolicyVersion("l", version), "", ""
    )
    counts = TaskProgress(consumed=consumed)
    pools = Leftovers(completed, 0, expired)
    return contexts(limits, state, ProduceProgress(step, {task: counts}, {task: pools}))[task]


def mix_of(batch_size: int, weights: Mapping[str, float]) -> TaskMix:
    return TaskMix(batch_size, [Reweighting(from_step=1, weights=dict(weights))])


WEIGHTS = st.floats(0, 1e6) | st.integers(0, 50).map(float) | st.floats(0, 1)


@given(
    st.lists(WEIGHTS, min_size=1, max_size=7).filter(any), st.integers(1, 40), st.integers(1, 300)
)
@example([1.0, 40.0], 16, 192)  # where each batch was shared by itself, the first got nothing
@example([0.05, 0.95], 8, 100)
@example([1e-300, 1.0], 1, 100)
def test_after_every_step_each_task_is_within_one_group_of_its_weight(
    weights: list[float], batch_size: int, steps: int
) -> None:
    tasks = {f"task{n}": weight for n, weight in enumerate(weights)}
    total = sum(map(Fraction, weights))
    mix, sums = mix_of(batch_size, tasks), Counter[str]()
    for step in range(1, steps + 1):
        shares = mix.shares(step)
        assert min(shares.values()) >= 0
        assert sum(shares.values()) == batch_size
        sums.update(shares)
        for task, weight in tasks.items():
            assert abs(sums[task] - step * batch_size * Fraction(weight) / total) < 1


RESUMED = """
import sys, orjson
from buffer.task_mix import Reweighting, TaskMix
mixes = [TaskMix(size, [Reweighting(from_step=1, weights=w)]) for size, w in orjson.loads(sys.argv[1])]
print(orjson.dumps([[mix.shares(step) for step in range(137, 141)] for mix in mixes]).decode())
"""


def test_a_process_that_starts_at_a_step_shares_it_as_one_that_was_there() -> None:
    cases = [
        (16, {"a": 1.0, "b": 40.0}),
        (8, {"a": 0.05, "b": 0.95}),
        (5, {"a": 3.3, "b": 1e-3, "c": 2.0}),
    ]
    there = []
    for size, weights in cases:
        mix = mix_of(size, weights)
        there.append([mix.shares(step) for step in range(1, 141)][136:])
    command = [sys.executable, "-c", RESUMED, orjson.dumps(cases).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert orjson.loads(done.stdout) == there


def test_weights_that_change_at_every_step_take_away_no_remainder() -> None:
    """As `rolloutmq set` changes them: what a task is still owed is not forgotten."""
    history = [
        Reweighting(from_step=step, weights={"rare": 1 + step / 1000, "math": 40})
        for step in range(1, 60)
    ]
    mix = TaskMix(16, history)
    exact = sum(16 * (1 + step / 1000) / (41 + step / 1000) for step in range(1, 60))
    assert abs(mix.groups_until("rare", 59) - exact) < 1


def test_each_task_has_its_share_and_its_own_settings_over_the_common_ones(tmp_path: Path) -> None:
    limits = config(tmp_path).limits()
    chosen = strategies_of(limits)
    assert [type(chosen[task]) for task in chosen] == [
        AsyncProduceStrategy,
        AsyncProduceStrategy,
        SyncProduceStrategy,
    ]
    assert [chosen[task].plan(seen(task, limits)).target for task in chosen] == [19 + 3, 9 + 1, 0]
    assert [chosen[task].plan(seen(task, limits)).pools[0] for task in chosen] == [
        ("aborted", 1),
        ("expired", 4),
        ("aborted", 1),
    ]
    assert [limits.retries_expired(task) for task in limits.tasks] == [False, True, False]
    assert config(tmp_path).strategy_of("code").enable_partial_rollout


def limits_of(**changes: object) -> RunLimits:
    return RunLimits(tasks={"math": TaskLimits()}, batch_size=4, **changes)


def test_sync_starts_the_batches_of_the_newest_weights_and_no_other() -> None:
    strategy = SyncProduceStrategy(
        "math", limits_of(steps=9, sync_weights_interval=4, stale_threshold=8)
    )
    assert [strategy.target(version) for version in (0, 4, 8)] == [16, 32, 36]
    assert strategy.plan(seen("math", strategy.limits)).pools == (("aborted", 1),)


def test_groups_are_started_less_far_ahead_than_they_may_be_late() -> None:
    """Started for at most two steps, and trained up to four publications late (I8)."""
    limits = limits_of(steps=10, stale_threshold=5, ahead_threshold=2)
    strategy = AsyncProduceStrategy("math", limits)
    assert [strategy.target(version) for version in (0, 1, 9)] == [8, 12, 40]
    assert (limits.threshold("math"), limits.horizon_of(1)) == (5, 2)
    limits.tasks["math"].ahead_threshold = 9  # never further than what would be trained
    assert strategy.target(0) == 20


@pytest.mark.parametrize("kind", [SyncProduceStrategy, AsyncProduceStrategy])
def test_what_a_batch_was_short_of_is_not_made_later(
    kind: type[SyncProduceStrategy | AsyncProduceStrategy],
) -> None:
    strategy = kind("math", limits_of(steps=9))
    full, short = (
        strategy.plan(seen("math", strategy.limits, version=1, step=2, consumed=n)) for n in (4, 3)
    )
    assert (full.target, short.target) == (8, 7)


def test_should_continue_gets_what_is_ready_and_wanted_and_may_answer_enough() -> None:
    asked: list[tuple[int, int, int]] = []

    def below_three(completed: int, wanted: int, *, progress: TaskProgress) -> bool:
        asked.append((completed, wanted, progress.consumed))
        return completed < 3

    strategy = SyncProduceStrategy("math", limits_of(steps=9), below_three)
    plans = [
        strategy.plan(seen("math", strategy.limits, version=1, step=2, consumed=4, completed=n))
        for n in (0, 2, 3)
    ]
    assert [plan.is_enough for plan in plans] == [False, False, True]
    assert asked == [(0, 4, 4), (2, 4, 4), (3, 4, 4)]


def test_new_weights_change_the_share_from_their_step_on_and_no_target_before() -> None:
    mix = TaskMix(
        6,
        [
            Reweighting(from_step=1, weights={"math": 1, "code": 1}),
            Reweighting(from_step=4, weights={"math": 2, "code": 1}),
            Reweighting(from_step=6, weights={"math": 0, "code": 1}),
        ],
    )
    assert [mix.shares(step)["math"] for step in range(1, 8)] == [3, 3, 3, 4, 4, 0, 0]
    for step in range(8):
        assert mix.groups_until("math", step) == sum(
            mix.shares(t)["math"] for t in range(1, step + 1)
        )


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=12
    ),
    st.integers(1, 5),
)
def test_changes_long_past_may_be_forgotten_but_for_their_sum(
    changes: list[tuple[int, int, int]], most: int
) -> None:
    """Some steps apart, each added to what is still remembered."""
    first = Reweighting(from_step=1, weights={"math": 1, "code": 1})
    whole, kept, step = [first], [first], 1
    for gap, math, code in changes:
        step += gap
        part = Reweighting(from_step=step, weights={"math": math, "code": code})
        whole, kept = [*whole, part], newest_parts([*kept, part], TaskMix(7, [*kept, part]), most)
    assert len(kept) <= most
    for at in range(kept[0].from_step, step + 4):
        assert TaskMix(7, kept).shares(at) == TaskMix(7, whole).shares(at)
        for task in ("math", "code"):
            assert TaskMix(7, kept).groups_until(task, at) == TaskMix(7, whole).groups_until(
                task, at
            )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.kind=sync", "sync starts exactly the batch"),
        ("strategy.is_valid_sample_fn=bogus", "expected not_all_equal or package.module:function"),
        ("strategy.should_continue_fn=half", "expected package.module:function"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, override)


def test_not_all_equal_wants_scores_that_differ() -> None:
    def group(*scores: float) -> list[RolloutState]:
        return [
            RolloutState(index=place, reward={"score": score}) for place, score in enumerate(scores)
        ]

    assert not_all_equal(group(0.0, 1.0))
    assert not not_all_equal(group(1.0, 1.0))
    assert not not_all_equal(group(1.0))
    assert load_sample_filter("not_all_equal") is not_all_equal
    with pytest.raises(ConfigError, match="no 'nothing'"):
        load_sample_filter("buffer.redis.keys:nothing")
