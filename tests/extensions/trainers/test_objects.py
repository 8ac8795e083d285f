from __future__ import annotations

from enum import Enum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from buffer.errors import WireError
from rolloutmq.extensions.trainers import plain_values
from rolloutmq.extensions.trainers.plain_values import Kinds, apart, models_of, together


class Color(Enum):
    RED = 1


class Point(BaseModel):
    at: tuple[int, int]
    color: Color | None = None


KINDS: Kinds = {**models_of("tests"), "fraction": (Fraction, str, Fraction)}

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
    data = plain_values.encode(apart(value, KINDS), "value")
    assert together(plain_values.decode(data), KINDS) == value


def test_an_object_of_no_kind_is_refused() -> None:
    with pytest.raises(WireError, match=r"value\.a\.b"):
        plain_values.encode(apart({"a": {"b": object()}}, KINDS), "value")


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "pydantic:BaseModel"])
def test_a_message_cannot_name_a_type_of_another_package(name: str) -> None:
    with pytest.raises(WireError):
        together({"kind of object": "model", "of": [name, {}]}, KINDS)
