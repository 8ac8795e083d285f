from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import WireError
from buffer.wire.foreign_json import MAX_DEPTH, read_json

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(VALUES, st.integers(0, 2 * MAX_DEPTH), st.booleans())
def test_a_value_comes_back_unless_it_is_too_deep(value: Any, depth: int, is_map: bool) -> None:
    nested = value
    for _ in range(depth):
        nested = {"a": nested} if is_map else [nested]
    text = orjson.dumps(nested)
    levels = depth + _depth(value)
    if levels <= MAX_DEPTH:
        assert read_json(text, "it") == nested
    else:
        with pytest.raises(WireError, match="it is nested more than"):
            read_json(text, "it")


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + max(map(_depth, items), default=0)


@given(st.binary() | st.sampled_from([b"[", b"{", b'{"a":', b"[[],"]).map(lambda part: part * 9999))
def test_other_bytes_are_refused_in_one_short_line(text: bytes) -> None:
    refused = ""
    try:
        read_json(text, "it")
    except WireError as error:
        refused = str(error)
    assert len(refused) < 600
    assert "\n" not in refused


def test_more_bytes_than_allowed_are_not_parsed() -> None:
    assert read_json(b'"xx"', "it", most=4) == "xx"
    with pytest.raises(WireError, match="it has more than 3 bytes"):
        read_json(b'"xx"', "it", most=3)
