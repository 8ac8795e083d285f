"""Objects of another trainer, without the trainer."""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from buffer.errors import WireError
from buffer.wire.document import encode_value
from rolloutmq.integrations.object_values import ObjectValues


class Color(Enum):
    RED = 1


class Point(BaseModel):
    at: tuple[int, int]
    color: Color | None = None


VALUES = ObjectValues("tests", {"fraction": (Fraction, str, Fraction)})

leaves: st.SearchStrategy[Any] = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(), st.binary()),
    *(st.fractions(), st.just(Color.RED), st.builds(Point, at=st.just((1, 2)))),
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(values)
def test_what_is_taken_apart_is_put_together(value: Any) -> None:
    plain = VALUES.apart(value, lambda array: array.tobytes())
    encode_value(plain)  # only what a message can hold
    assert VALUES.together(plain, bytes) == value


def test_arrays_keep_their_type_and_shape() -> None:
    kept: list[bytes] = []
    array = np.arange(6, dtype=">i2").reshape(2, 3)

    def keep(data: np.ndarray) -> int:
        kept.append(data.tobytes())
        return 0

    plain = VALUES.apart({"a": [array]}, keep)
    (made,) = VALUES.together(plain, kept.__getitem__)["a"]
    np.testing.assert_array_equal(made, array)
    assert made.dtype == array.dtype


@pytest.mark.parametrize("value", [object(), np.array([object()]), {1: 2}, {1}], ids=repr)
def test_other_objects_are_refused(value: object) -> None:
    with pytest.raises(WireError, match=r"a\.b"):
        VALUES.apart({"a": {"b": value}}, lambda array: 0)


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "pydantic:BaseModel"])
def test_a_message_cannot_name_a_type_of_another_package(name: str) -> None:
    with pytest.raises(WireError):
        VALUES.together({"kind of object": "model", "of": [name, {}]}, bytes)
