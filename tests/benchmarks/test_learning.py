"""The pipeline at staleness 0 is the loop without a queue: the same batches, the same losses, step
by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.learning import distill, long_answers
from benchmarks.learning.__main__ import grid, missing
from benchmarks.learning.plot import ends, plot
from benchmarks.learning.sums import RUNNING_SUMS, SUMS, make_model, two_terms
from benchmarks.learning.trial import (
    Setting,
    fleet_thread,
    make_controller,
    make_run,
    run_trial,
    train,
    train_in_process,
)
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.wire.group import RolloutGroup
from consumer.grpo.learner.train_controller import TrainController
from rolloutmq.config.small_model import WarmStartConfig

LITTLE = replace(SUMS, warm_start=WarmStartConfig(stop_accuracy=0.02, seed=1))
SETTING = Setting(steps=4, batch=3, k=4, seed=5)


class NotingController(TrainController):
    """Knows what it was given."""

    def fit(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        self.seen = [
            *getattr(self, "seen", []),
            [(g.gid, [s.response_ids.tolist() for s in g.states]) for g in groups],
        ]
        return super().fit(groups)


@pytest.mark.slow
def test_a_student_is_trained_on_groups_with_the_values_of_its_teacher(tmp_path: Path) -> None:
    model = make_model(tmp_path, LITTLE)
    with EmbeddedServer(tmp_path / "server") as server:
        trial = distill.Trial("top 8 of the teacher", seed=1, steps=2)
        first, _ = distill.run_arm(server.url, trial, model, model, tmp_path)
    # the teacher is the student itself: there is nothing to learn in the first step
    assert first["distill/coverage"] == first["distill/top_coverage"] == 1
    assert first["distill/reverse_kl"] == pytest.approx(0, abs=1e-4)
    assert first["distill/top_kl"] == pytest.approx(0, abs=1e-4)
    assert distill.steps_to([0.0, 0.0, 0.5, 0.9, 0.9, 0.9, 0.9], 0.9) == 7


@pytest.mark.slow
def test_pipeline_at_staleness_0_is_the_loop_without_a_queue_step_by_step(tmp_path: Path) -> None:
    model = make_model(tmp_path, LITTLE)
    one, other = (NotingController(make_controller(model, SETTING).policy) for _ in range(2))
    alone = train_in_process(one, SETTING, model, tmp_path / "alone")
    with EmbeddedServer(tmp_path / "server") as server:
        store = Store(server.url)
        run = make_run(store, "queue", model, SETTING)
        with fleet_thread(run, model, SETTING):
            queued = train(run, other, SETTING, tmp_path, model)
        assert run.account.fsck().clean
        store.close()
    assert [point["staleness"] for point in queued] == [0.0] * SETTING.steps
    assert [sorted(batch) for batch in other.seen] == [sorted(batch) for batch in one.seen]
    for by_hand, by_queue in zip(alone, queued, strict=True):
        assert by_queue["reward"] == by_hand["reward"]
        assert by_queue["loss"] == pytest.approx(by_hand["loss"], rel=1e-5, abs=1e-8)
    assert any(point["loss"] for point in alone)


@pytest.mark.slow
def test_staleness_is_its_bound_as_soon_as_there_are_so_many_steps(tmp_path: Path) -> None:
    model = make_model(tmp_path, LITTLE)
    with EmbeddedServer(tmp_path / "server") as server:
        points, sample_s = run_trial(
            server.url, model, Setting(staleness=2, steps=5, batch=2, k=2), tmp_path
        )
    assert [point["staleness"] for point in points] == [0, 1, 2, 2, 2]
    assert sample_s > 0


@pytest.mark.slow
def test_one_limit_drops_long_answers_that_come_late_and_two_limits_train_them(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path, replace(RUNNING_SUMS, warm_start=LITTLE.warm_start))
    found = {}
    with EmbeddedServer(tmp_path / "server") as server:
        for way in long_answers.WAYS:
            trial = long_answers.Trial(way, steps=5, batch=8, k=2)
            found[way] = long_answers.run_trial(server.url, model, trial, tmp_path)
    lengths = {way: sum(columns["trained_length"]) for way, columns in found.items()}
    assert lengths["one limit, drop"] < lengths["two limits"]
    ages = {way: max(columns["staleness"]) for way, columns in found.items()}
    assert ages["one limit, wait"] <= 1 < ages["two limits"]


def test_problems_are_those_of_their_numbers() -> None:
    for number in range(50):
        asked = two_terms(number)
        assert eval_sum(asked.messages[0]["content"]) == int(asked.answer)
        assert two_terms(number) == asked


def eval_sum(text: str) -> int:
    first, sign, second = text.removesuffix(" =").split()
    return int(first) + int(second) if sign == "+" else int(first) - int(second)


def line(setting: Setting) -> bytes:
    columns: dict[str, Any] = {
        "step": [1, 2, 3],
        "reward": [0.1, 0.2, 0.3],
        "wall_s": [1, 2, 3],
        "train_s": [1, 1, 1],
    }
    return orjson.dumps({"setting": asdict(setting), "sample_s": 0.5} | columns)


def test_a_trial_that_has_a_line_is_not_run_again_and_the_plot_shows_what_is_there(
    tmp_path: Path,
) -> None:
    file = tmp_path / "learning.jsonl"
    settings = grid([0, 4], ["default", "plain"], [1e-3], seeds=2, steps=3)
    assert len({setting.name for setting in settings}) == 2 * 2 * 2 + 2 * 2
    assert missing(settings, file) == settings
    file.write_bytes(b"\n".join(map(line, settings[:5])) + b"\n")
    assert missing(settings, file) == settings[5:]
    plot(file, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 10_000


def test_sampling_and_training_overlap_as_far_as_staleness_lets_them() -> None:
    assert ends(2.0, [3.0] * 3, staleness=0) == [5.0, 10.0, 15.0]
    assert ends(2.0, [3.0] * 3, staleness=1) == [5.0, 8.0, 11.0]
    assert ends(3.0, [2.0] * 3, staleness=1) == [5.0, 8.0, 11.0]
    assert ends(1.0, [3.0, 1.0, 1.0], staleness=8) == [4.0, 5.0, 6.0]
