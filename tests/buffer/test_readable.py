from __future__ import annotations

import json

import orjson
from hypothesis import given
from hypothesis import strategies as st

from buffer.readable import visible

UNSEEN = "\x7f\x80\x9b31m\x9d\xad\u061c\u200e\u202e\u2028\u2066\ufeff\U000e0041"


@given(st.recursive(st.text() | st.sampled_from(list(UNSEEN)), st.lists))
def test_value_stays_the_same_and_is_printable(value: object) -> None:
    text = visible(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
    assert json.loads(text) == value
    assert orjson.loads(text) == value
    assert all(character.isprintable() or character == "\n" for character in text)


def test_printable_text_is_left_as_it_is() -> None:
    for text in ('"Grüße, 世界 🙂"', '{"a": 1}', '"\\u0000"'):
        assert visible(text) == text
