from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import ConfigError
from buffer.ids import group_id, split_group_id, valid_name
from buffer.redis.keys import Keys

NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)


@pytest.mark.parametrize("name", ["", "a b", "a{b}", "a:b", "ä", "a" * 65, "a/b", "a\n", "*"])
def test_names_that_could_forge_a_key_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="task name"):
        valid_name("task", name)
    with pytest.raises(ConfigError):
        Keys(name)


@given(task=NAMES, draw=st.integers(0, 10**10 - 1))
def test_group_id_says_task_and_draw(task: str, draw: int) -> None:
    assert split_group_id(group_id(task, draw)) == (task, draw)


@pytest.mark.parametrize(
    "text",
    [
        "", "math", "math-1", "-0000000001", "math-00000000001x", "ma th-0000000001",
        "a\n-0000000001",
    ],
)  # fmt: skip
def test_what_is_no_group_id_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a group id"):
        split_group_id(text)


def test_chunks_of_a_payload_follow_its_key() -> None:
    names = Keys("demo").payload_chunks("g-0000000001", "t", 3)
    base = "rmq:{demo}:payload:g-0000000001:t"
    assert names == [base, f"{base}:1", f"{base}:2"]
