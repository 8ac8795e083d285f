from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from buffer.control import fleet
from buffer.control.length_counts import (
    BOUNDS,
    CUT,
    FINISHED,
    MIDDLES,
    MOST_BYTES,
    WINDOW,
    LengthCounts,
    count,
    length_bias,
    read_counts,
    whole_lengths,
)
from buffer.control.worker_record import Histogram, parse_counts
from tests.buffer.scene import Scene

Lengths = Sequence[int] | NDArray[np.int32]


def counted(fates: Mapping[str, Lengths], task: str = "math") -> LengthCounts:
    counts = LengthCounts()
    for fate, lengths in fates.items():
        counts.add(task, fate, lengths)
    return counts


def bias(trained: Mapping[str, Lengths], started: Mapping[str, Lengths]) -> dict[str, float]:
    found = length_bias(counted(trained).by_task(), counted(started).by_task())
    return {name.removesuffix("/math"): value for name, value in found.items()}


SHORT, LONG = [100] * 90, [1000] * 10


def test_bias_is_what_a_person_works_out() -> None:
    """A tenth is long and none of it is trained: the mean is 100 of 190, and the tail is empty."""
    found = bias({FINISHED: SHORT}, {FINISHED: SHORT, "expired": LONG})
    assert found["length_bias/mean"] == pytest.approx(100 / 190, rel=0.05)
    assert found["length_bias/expired"] == found["length_bias/mean"]
    assert (found["length_bias/tail"], found["length_bias/pool"]) == (0, 1)
    assert found["started_len/mean"] == pytest.approx(190, rel=0.1)
    fair = bias({FINISHED: [*SHORT, *LONG]}, {FINISHED: [*SHORT, *LONG]})
    assert fair["length_bias/mean"] == fair["length_bias/tail"] == 1.0
    one = counted({FINISHED: [1]}).by_task()
    assert length_bias(one, counted({FINISHED: [1]}, "code").by_task()) == {}
    assert length_bias(one, counted({"expired": [1]}).by_task()) == {}


@pytest.mark.parametrize(
    ("cause", "trained", "started"),
    [
        ("failed", {FINISHED: SHORT}, {FINISHED: SHORT, "failed": LONG}),
        ("filtered", {FINISHED: SHORT}, {FINISHED: SHORT, "filtered": LONG}),
        ("pool", {FINISHED: SHORT}, {FINISHED: [*SHORT, *LONG]}),
        ("truncated", {FINISHED: SHORT, "truncated": LONG}, {FINISHED: [*SHORT, *LONG]}),
        ("no_advantage", {FINISHED: SHORT, "no_advantage": LONG}, {FINISHED: [*SHORT, *LONG]}),
    ],
)
def test_whatever_takes_the_difference_is_named(
    cause: str, trained: Mapping[str, Lengths], started: Mapping[str, Lengths]
) -> None:
    even = [*SHORT, *LONG] * 2  # what takes short and long ones alike is no bias
    found = bias(trained, {"dropped": even, **started})
    ratios = {name: value for name, value in found.items() if name.startswith("length_bias/")}
    assert ratios.pop("length_bias/mean") < 0.6
    assert ratios.pop("length_bias/tail") == 0
    assert ratios.pop(f"length_bias/{cause}") < 0.9
    assert all(abs(ratio - 1) < 0.05 for ratio in ratios.values())


def test_what_was_cut_counts_with_the_length_that_it_would_have_had() -> None:
    """Cut at any time, whatever their length: the estimate has the mean of all that were started."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 1, 40_000)
    limits = rng.exponential(1500, len(lengths))
    ended, cut = lengths[lengths <= limits], limits[lengths > limits]
    assert len(cut) > 8000
    fates = counted({FINISHED: ended.astype("<i4"), "failed" + CUT: cut.astype("<i4")})
    whole = whole_lengths(fates.by_task()["math"])
    assert whole.keys() == {FINISHED, "failed"}
    total = sum(whole.values(), np.zeros(len(MIDDLES)))
    assert total.sum() == pytest.approx(len(lengths), rel=0.001)
    for share in (0.5, 0.9, 0.99):
        place = int(np.searchsorted(np.cumsum(total), share * total.sum()))
        assert BOUNDS[place] == pytest.approx(np.quantile(lengths, share), rel=0.2)
    assert total @ MIDDLES / total.sum() == pytest.approx(lengths.mean(), rel=0.05)


def test_groups_that_never_end_are_no_short_ones() -> None:
    """One in twenty takes twenty times as long, and each of these is cut on its way."""
    rng = np.random.default_rng(0)
    short = np.round(2000 * rng.lognormal(0, 0.3, 1880)).astype("<i4")
    cut = np.round(rng.uniform(0, 40_000, 120)).astype("<i4")
    found = bias({FINISHED: short}, {FINISHED: short, "expired" + CUT: cut})
    assert found["length_bias/tail"] < 0.1
    assert found["length_bias/mean"] < 0.6  # 0.51 where all are known


def test_texts_of_workers_add_up() -> None:
    rng = np.random.default_rng(0)
    alone, workers = LengthCounts(), [LengthCounts() for _ in range(3)]
    for worker in workers:
        lengths = np.round(rng.lognormal(6, 1, 400)).astype(np.int32)
        for counts in (alone, worker):
            counts.add("math", FINISHED, lengths)
            counts.add("a.b-c_d", "expired" + CUT, lengths[:9])
            counts.add("a.b-c_d", "expired", [1, 1 << 30])
    joined, whole = read_counts(worker.text() for worker in workers), alone.by_task()
    assert {task: fates.keys() for task, fates in joined.items()} == {
        task: fates.keys() for task, fates in whole.items()
    }
    for task, fates in joined.items():
        for fate, numbers in fates.items():
            assert numbers.tolist() == whole[task][fate].tolist()


@pytest.mark.parametrize(
    "text",
    [
        *("", "math", "math:finished=", "math:finished=1", "math=1 1", "math:finished=x 1"),
        *("math:finished=1 -1", ":finished=1 1", "math:finished=99 1"),
        "math:finished=70" + " 1" * 20,
    ],
)
def test_what_another_worker_writes_wrongly_counts_as_missing(text: str) -> None:
    assert read_counts([text, "code:finished=3 3"]).keys() == {"code"}


def test_a_text_is_bounded_and_old_lengths_fade() -> None:
    counts = LengthCounts()
    for n in range(400):
        counts.add(f"task{n}", FINISHED, [n + 1] * 40)
    assert len(counts.text().encode()) <= MOST_BYTES
    for length in (10, 1000):
        for _ in range(40):
            counts.add("math", FINISHED, [length] * (WINDOW // 20))
            assert count(counts.by_task()["math"]) <= WINDOW * 1.1
    (numbers,) = counts.by_task()["math"].values()
    assert BOUNDS[np.flatnonzero(numbers)].tolist() == [1024]


def test_lengths_that_grow_with_the_model_are_no_bias_in_a_large_fleet() -> None:
    """A worker remembers thousands of responses, and a fleet as many times more of the past."""
    workers, trained = [LengthCounts() for _ in range(16)], LengthCounts()
    for step in range(400):
        length = 100 + 2 * step
        for worker in workers:
            worker.add("math", FINISHED, [length] * 100)
        started = read_counts(worker.text() for worker in workers)
        for _ in range(16):
            trained.add("math", FINISHED, [length] * 100, count(started["math"]))
    found = length_bias(trained.by_task(), started)
    assert found["length_bias/mean/math"] == pytest.approx(1, abs=0.1)


def test_some_workers_stand_for_the_lengths_of_all(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scene.run.fleet.response_lengths() == {}
    text = counted({FINISHED: SHORT, "expired": LONG}).text()
    for worker in range(6):
        scene.worker(f"w{worker}")
        scene.raw.hset(scene.keys.worker(f"w{worker}"), "lengths", text)
    whole = scene.run.fleet.response_lengths()["math"]
    assert (count(whole), whole["expired"].sum()) == (600, 60)
    monkeypatch.setattr(fleet, "MOST_COUNTED", 4)
    some = scene.run.fleet.response_lengths()["math"]
    assert {fate: numbers.tolist() for fate, numbers in some.items()} == {
        fate: numbers.tolist() for fate, numbers in whole.items()
    }


BOUNDS_S = (0.1, 1.0, 10.0)


def test_a_duration_counts_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    times = Histogram(BOUNDS_S)
    for seconds in (0.0, 0.1, 0.11, 10.0, 99.0):
        times.add(seconds)
    assert times.counts == (2, 1, 1, 1)
    assert times.at_most() == {0.1: 2, 1.0: 3, 10.0: 4}
    assert times.count == 5
    assert times.total_s == pytest.approx(109.21)


@pytest.mark.parametrize(
    ("counts", "share", "seconds"),
    [
        ((0, 0, 0, 0), 0.5, 0.0), ((4, 0, 0, 0), 0.5, 0.05), ((2, 2, 0, 0), 0.5, 0.1),
        ((2, 2, 0, 0), 0.75, 0.55), ((0, 0, 1, 0), 1.0, 10.0), ((1, 0, 0, 9), 0.99, 10.0),
    ],
)  # fmt: skip
def test_quantiles_are_interpolated_within_a_bucket(
    counts: tuple[int, ...], share: float, seconds: float
) -> None:
    assert Histogram(BOUNDS_S, counts).quantile_s(share) == pytest.approx(seconds)


def test_counts_by_other_bounds_are_ignored() -> None:
    assert Histogram(BOUNDS_S, (1, 2, 3), total_s=4.0).count == 0
    assert Histogram(BOUNDS_S, (1, 2, 3), total_s=4.0).total_s == 0.0


@pytest.mark.parametrize("text", ["1 x", "-1", "1.5", "²", "1" * 16])
def test_text_that_is_no_list_of_counts_is_none(text: str) -> None:
    assert parse_counts(text) is None
