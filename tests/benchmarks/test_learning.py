"""The pipeline at staleness 0 is the loop without a queue: the same batches, the same losses, step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from benchmarks.learning.fleet import Fleet
from benchmarks.learning.plot import plot
from benchmarks.learning.sampler import Sampler
from benchmarks.learning.sums import make_model, problem
from benchmarks.learning.trial import Setting, make_controller, make_run, train, train_in_process
from buffer import Mode, Store
from buffer.server.embedded import EmbeddedServer

SETTING = Setting(steps=4, batch=3, k=4, seed=5)


def test_pipeline_at_staleness_0_is_the_loop_without_a_queue_step_by_step(tmp_path: Path) -> None:
    model = make_model(tmp_path, stop_accuracy=0.02)
    alone = train_in_process(make_controller(model, SETTING), SETTING, model, tmp_path / "alone")
    with EmbeddedServer(tmp_path / "server") as server:
        queued, _ = run_trial(server.url, model, SETTING, tmp_path)
        store = Store(server.url)
        (run,) = (Run.open(store, name) for name in store.runs())
        assert run.account.fsck().clean
        store.close()
    assert [point["staleness"] for point in queued] == [0.0] * SETTING.steps
    for one, other in zip(alone, queued, strict=True):
        assert other["gids"] == one["gids"]
        assert other["reward"] == one["reward"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-8)
    assert any(point["loss"] for point in alone)


def test_staleness_is_its_bound_where_the_trainer_waits_for_the_fleet(tmp_path: Path) -> None:
    """And a trial is the same whatever else the machine does."""


def test_problems_are_those_of_their_numbers() -> None:
    for number in range(50):
        asked = problem(number)
        assert eval_sum(asked.messages[0]["content"]) == int(asked.answer)
        assert problem(number) == asked


def eval_sum(text: str) -> int:
    first, sign, second = text.removesuffix(" =").split()
    return int(first) + int(second) if sign == "+" else int(first) - int(second)


def test_plot_shows_every_bound(tmp_path: Path) -> None:
    points = [
        {"bound": b, "corrected": c, "seed": s, "step": t, "wall_s": t * 0.5, "reward": 0.1 * t}
        for b in (0, 4)
        for c in (True, False)
        for s in (0, 1)
        for t in (1, 2, 3)
    ]
    (tmp_path / "points.jsonl").write_bytes(b"\n".join(map(orjson.dumps, points)))
    plot(tmp_path / "points.jsonl", tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 10_000
