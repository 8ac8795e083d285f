from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from buffer.control.progress import Leftovers, ProduceProgress, TaskProgress
from buffer.wire.group import GROUP_TIME, NEW_CONTEXTS, RolloutGroup
from buffer.wire.rollout import RolloutState
from consumer.grpo.reporting.metrics import BatchColumns, Throughput, Timing, production_metrics


def reading(step: int, **counts: float) -> ProduceProgress:
    return ProduceProgress(step, {"math": TaskProgress(**counts)}, {"math": Leftovers(3, 1, 2)})  # type: ignore[arg-type]


def group(*scores: float, seconds: float | None) -> RolloutGroup:
    extra = {} if seconds is None else {GROUP_TIME: seconds}
    states = [RolloutState(index=i, reward={"score": s}, extra=extra) for i, s in enumerate(scores)]
    return RolloutGroup("math-0000000000", "math", states)


def test_throughput_is_that_of_the_references_worked_example() -> None:
    """Check 3 train GPUs, 2 rollout GPUs, 8 s in total, 3 samples, 60 tokens.

    The step takes 10 s, 2 s of it for training. Production never stops here, so 4 samples are
    divided by the step's 10 s, not by 4 s.
    """
    total = Throughput(train_gpus=3, rollout_gpus=2, elapsed_s=-2.0)
    produced = {"async/produced_samples": 4.0, "async/produced_tokens": 120.0}
    metrics = total.metrics(3, 60, Timing(train=2.0, step=10.0), produced)
    assert metrics == {
        "throughput/e2e_effective_sgs": pytest.approx(0.125),
        "throughput/e2e_effective_tgs": pytest.approx(2.5),
        "throughput/effective_sgs": pytest.approx(0.1),
        "throughput/effective_tgs": pytest.approx(2.0),
        "throughput/training_tgs": pytest.approx(10.0),
        "throughput/rollout_sgs": pytest.approx(0.2),
        "throughput/rollout_tgs": pytest.approx(6.0),
    }


def test_production_is_what_was_added_between_two_readings() -> None:
    before = reading(4, raw_rewards_sum=10.0, raw_rewards_count=20, filtered=2, produced_tokens=100)
    now = reading(
        5, raw_rewards_sum=13.0, raw_rewards_count=24, filtered=5, produced_tokens=160, failed=1
    )
    metrics = production_metrics(before, now)
    assert metrics["raw_rewards/mean"] == pytest.approx(0.75)
    assert (metrics["async/filtered_groups"], metrics["async/failed_tries"]) == (3.0, 1.0)
    assert (metrics["async/produced_tokens"], metrics["async/completed_groups"]) == (60.0, 3.0)
    assert "raw_rewards/mean" not in production_metrics(now, now)


def test_answers_without_a_reading_are_a_share_of_those_that_were_judged() -> None:
    before = reading(4, raw_rewards_count=20, unparsed=2)
    now = reading(5, raw_rewards_count=24, unparsed=3)
    assert production_metrics(before, now)["unparsed/math"] == pytest.approx(0.25)
    later = reading(6, raw_rewards_count=28, unparsed=3)
    assert production_metrics(now, later)["unparsed/math"] == 0.0
    assert "unparsed/math" not in production_metrics(reading(4), reading(5, raw_rewards_count=9))


def test_group_times_are_those_of_the_groups_that_carry_one() -> None:
    times = [float(n) for n in range(1, 101)]
    groups = [group(1.0, 0.0, seconds=s) for s in [*times, None]]
    ranks = [groups[:40], [], groups[40:]]
    parts = [BatchColumns.of(part, np.zeros(2 * len(part), "<f4")).lists() for part in ranks]
    metrics = BatchColumns.join(parts).metrics()
    assert (metrics["task/n"], metrics["task/p50_s"], metrics["task/p99_s"]) == (100.0, 51.0, 100.0)
    assert metrics["task/p99_p50_ratio"] == pytest.approx(100 / 51)
    assert (metrics["rewards/mean"], metrics["rewards/solved"]) == (0.5, 1.0)


def test_a_group_with_partial_credit_alone_is_not_solved() -> None:
    groups = [group(0.0, 0.9, seconds=None), group(0.1, 1.0, seconds=None)]
    metrics = BatchColumns.of(groups, np.zeros(4, "<f4")).metrics()
    assert metrics["rewards/solved"] == 0.5


@pytest.mark.parametrize(
    "written", [{"turn": 2, "branch": 1}, {"turn": 2, "branch": 1, "odd": "x"}]
)
def test_new_contexts_of_agents_are_added_up_by_task_and_reason(written: object) -> None:
    groups = [group(1.0, seconds=None) for _ in range(3)]
    for each, contexts in zip(groups, (written, "rubbish", {"turn": 1}), strict=True):
        each.shared.extra[NEW_CONTEXTS] = contexts
    metrics = BatchColumns.of(groups, np.zeros(3, "<f4")).metrics()
    counted = {name: value for name, value in metrics.items() if name.startswith("new_contexts/")}
    assert counted == {"new_contexts/math/turn": 3, "new_contexts/math/branch": 1}


ROOT = Path(__file__).parents[3]

PROGRAM = """
import logging
from rolloutmq.process_log import log_json
from consumer.grpo.reporting.metric_writers import ProgressBar
from consumer.grpo.reporting.metric_writers import ProgressBar
log_json("trainer", "demo")
bar = ProgressBar(2, 5)
for step in (3, 4, 5):
    bar.write(step, {"rewards/mean": step / 10})
    if step == 4:
        logging.getLogger("rolloutmq.trainer").warning("between two steps")
bar.close()
"""
