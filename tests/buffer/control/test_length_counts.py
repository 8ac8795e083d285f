"""Lengths in buckets, and the bias between what was started and what was trained."""

from __future__ import annotations

import numpy as np
import pytest

from buffer.control import fleet
from buffer.control.length_counts import MOST_BYTES, WINDOW, LengthCounts, length_bias
from tests.buffer.scene import Scene


def counted(task: str, lengths: list[int]) -> LengthCounts:
    counts = LengthCounts()
    counts.add(task, lengths)
    return counts


def test_bias_is_what_a_person_works_out() -> None:
    """A tenth is long and none of it is trained: the mean is 100 of 190, and the tail is empty."""
    started = counted("math", [100] * 90 + [1000] * 10)
    found = length_bias(counted("math", [100] * 50), started)
    assert found["length_bias/mean/math"] == pytest.approx(100 / 190)
    assert found["length_bias/tail/math"] == 0
    assert found["started_len/p95/math"] == 1024
    fair = length_bias(started, started)
    assert fair["length_bias/mean/math"] == fair["length_bias/tail/math"] == 1.0
    assert length_bias(counted("math", [1]), counted("code", [1])) == {}


def test_texts_of_workers_add_up() -> None:
    rng = np.random.default_rng(0)
    parts = [np.round(rng.lognormal(6, 1, 400)).astype(np.int32) for _ in range(3)]
    alone, workers = LengthCounts(), [LengthCounts() for _ in parts]
    for worker, part in zip(workers, parts, strict=True):
        for counts in (alone, worker):
            counts.add("math", part)
            counts.add("a.b-c_d", part[:9])
    joined = LengthCounts.joined(worker.text() for worker in workers)
    assert joined.keys() == alone.keys()
    for task in joined:
        assert joined[task].tokens == alone[task].tokens
        assert joined[task].counts.tolist() == alone[task].counts.tolist()


@pytest.mark.parametrize("text", ["", "math", "math=", "math=1", "math=x 1", "math=1 -1", "=1 1"])
def test_what_another_worker_writes_wrongly_counts_as_missing(text: str) -> None:
    assert LengthCounts.joined([text, "code=3 3"]).keys() == {"code"}


def test_a_text_is_bounded_and_old_lengths_fade() -> None:
    counts = LengthCounts()
    for n in range(400):
        counts.add(f"task{n}", [n + 1] * 40)
    assert len(counts.text().encode()) <= MOST_BYTES
    for length in (10, 1000):
        for _ in range(4):
            counts.add("math", [length] * WINDOW)
    assert counts["math"].mean > 700
    assert counts["math"].count <= 2 * WINDOW


def test_lengths_that_grow_with_the_model_are_no_bias_in_a_large_fleet() -> None:
    """A worker remembers thousands of responses, and a fleet as many times more of the past."""
    workers, trained = [LengthCounts() for _ in range(16)], LengthCounts()
    for step in range(400):
        length = 100 + 2 * step
        for worker in workers:
            worker.add("math", [length] * 100)
        started = LengthCounts.joined(worker.text() for worker in workers)
        for _ in range(16):
            trained.add("math", [length] * 100, started)
    assert length_bias(trained, started)["length_bias/mean/math"] == pytest.approx(1, abs=0.1)


def test_some_workers_stand_for_the_lengths_of_all(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scene.run.fleet.response_lengths() == {}
    text = counted("math", [100] * 90 + [1000] * 10).text()
    for worker in range(6):
        scene.worker(f"w{worker}")
        scene.raw.hset(scene.keys.worker(f"w{worker}"), "lengths", text)
    whole = scene.run.fleet.response_lengths()["math"]
    assert (whole.tokens, whole.count) == (6 * 19_000, 600)
    monkeypatch.setattr(fleet, "MOST_COUNTED", 4)
    some = scene.run.fleet.response_lengths()["math"]
    assert (some.tokens, some.counts.tolist()) == (whole.tokens, whole.counts.tolist())
