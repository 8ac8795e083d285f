"""Every key is built in one place, lies in one slot, and cannot be forged by a name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import ConfigError
from buffer.ids import group_id, split_group_id, valid_name
from buffer.redis.keys import TABLE, Keys

NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)


def every_key(keys: Keys) -> dict[str, str]:
    """One of each kind, by the pattern of the table."""
    return {
        "meta": keys.meta,
        "control": keys.control,
        "clock": keys.clock,
        "lineages": keys.lineages,
        "report": keys.report,
        "jobs:<task>:<lane>": keys.jobs("math", "fresh"),
        "bell:<who>": keys.wake_up("trainer"),
        "group:<gid>": keys.group("math-0000000001"),
        "leases": keys.leases,
        "pool:<task>:<status>": keys.pool("math", "completed"),
        "order:<task>:completed": keys.order("math"),
        "age:<task>": keys.age("math"),
        "payload:<gid>:<token>": keys.payload("math-0000000001", "abc"),
        "garbage": keys.garbage,
        "bytes": keys.bytes,
        "snapshot_lock": keys.snapshot_lock,
        "weights": keys.weights,
        "weights:<lineage>:<version>": keys.weights_part("ab:3"),
        "ledger:<name>": keys.ledger("train"),
        "batch:<name>:<step>": keys.batch("train", 3),
        "progress:<task>": keys.progress("math"),
        "cursors": keys.cursors,
        "ended:<task>:<stage>": keys.ended("math", "archived"),
        "dead": keys.dead,
        "dead:<gid>": keys.dead_letter("math-0000000001"),
        "workers": keys.workers,
        "worker:<id>": keys.worker("w0"),
        "leased:<id>": keys.leased("w0"),
        "events": keys.events,
        "unpinned": keys.unpinned,
        "bad_submissions": keys.bad_submissions,
        "audits": keys.audits,
    }


def test_table_names_every_key() -> None:
    keys = every_key(Keys("demo"))
    assert set(TABLE) == set(keys)
    for pattern, key in keys.items():
        expected = re.sub(
            r"<\w+>", r"[^:]+", re.escape(pattern).replace(r"\<", "<").replace(r"\>", ">")
        )
        assert re.fullmatch(r"rmq:\{demo\}:" + expected, key)
    assert len(set(keys.values())) == len(keys)


def test_all_keys_of_a_run_share_one_hash_tag() -> None:
    for key in every_key(Keys("demo")).values():
        assert key[key.index("{") + 1 : key.index("}")] == "demo"


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
        "",
        "math",
        "math-1",
        "-0000000001",
        "math-00000000001x",
        "ma th-0000000001",
        "a\n-0000000001",
    ],
)
def test_what_is_no_group_id_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a group id"):
        split_group_id(text)


def test_chunks_of_a_payload_follow_its_key() -> None:
    names = Keys("demo").payload_chunks("g-0000000001", "t", 3)
    base = "rmq:{demo}:payload:g-0000000001:t"
    assert names == [base, f"{base}:1", f"{base}:2"]
