from __future__ import annotations

import math

import orjson
from hypothesis import given
from hypothesis import strategies as st

from consumer.handle.histogram import MOST_BINS, StepHistogram
from consumer.handle.step_log import TrainedStep

any_float = st.floats(width=64)
near = st.integers(0, 40).map(lambda n: 1e15 + n) | st.sampled_from((0.0, 1.0, 0.5, -1e-300))


@given(st.lists(any_float | near, max_size=60), st.sampled_from((0.0, 1.0)))
def test_every_finite_value_is_counted_once_in_its_bin(values: list[float], finest: float) -> None:
    counted = [value for value in values if abs(value) < 1e30]
    found = StepHistogram.of(values, finest)
    if found is None:
        assert counted == []
        return
    assert len(found.counts) <= MOST_BINS
    assert found.width >= finest
    assert math.frexp(found.width)[0] == 0.5  # a power of two
    for place, count in enumerate(found.counts, found.first):
        assert count == sum(math.floor(value / found.width) == place for value in counted)
    assert sum(found.counts) == len(counted)
    again = StepHistogram.parse(orjson.loads(orjson.dumps(found.document())))
    assert again == found
    assert len(orjson.dumps(found.document())) < 600


@given(
    st.recursive(
        st.none() | st.booleans() | any_float | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(("width", "first", "counts", "x")), inner, max_size=4)
        ),
        max_leaves=8,
    )
)
def test_what_is_no_histogram_is_left_out_of_a_step(written: object) -> None:
    """Whatever a trainer of somebody else wrote there: the step itself is read."""
    step = TrainedStep.parse({"step": 3, "metrics": {}, "histograms": {"mine": written}})
    assert step.step == 3
    for found in step.histograms.values():
        assert len(found.counts) <= MOST_BINS
