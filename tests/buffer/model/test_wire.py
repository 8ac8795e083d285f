"""The wire format: round trips, and bytes from anywhere (I11)."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.errors import SchemaVersionError, WireError
from buffer.model import wire
from buffer.model import wire as wire_reader
from buffer.model.group import RolloutGroup
from buffer.model.rollout import (
    MediaRef,
    RolloutState,
    SampleParams,
    Status,
    StructuredOutput,
    ToolCall,
    VersionSpan,
)
from tests.fuzz.promise import keep, plain

ROOT = Path(__file__).parents[3]

GOLDEN = Path(__file__).parents[1] / "golden" / "group_v1.msgpack"
GOLDEN_FULL = GOLDEN.with_name("group_v1_full.msgpack")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SCORES = st.floats(allow_nan=False, allow_infinity=False, width=32)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
PARAMS = st.builds(
    SampleParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 100),
    max_tokens=st.integers(1, 9999),
    stops=st.lists(TEXT, max_size=2),
    seed=st.none() | st.integers(0, 2**63 - 1),
    structured=st.none()
    | st.builds(StructuredOutput, regex=st.text(min_size=1, max_size=5))
    | st.builds(StructuredOutput, json_schema=st.dictionaries(TEXT, JSON, max_size=2)),
)
CALLS = st.builds(
    ToolCall,
    id=TEXT,
    name=TEXT,
    arguments=st.none() | st.dictionaries(TEXT, JSON, max_size=2),
    raw_arguments=TEXT,
)
MEDIA = st.builds(
    MediaRef,
    kind=st.sampled_from(["image", "video", "audio"]),
    uri=st.text("abc:/", min_size=1),
    tokens=st.integers(0, 99),
    grid_thw=st.none() | st.lists(st.integers(1, 9), min_size=3, max_size=3),
)


def floats(tokens: int) -> st.SearchStrategy[list[float] | None]:
    return st.none() | st.lists(st.floats(-100, 100, width=32), min_size=tokens, max_size=tokens)


def experts(prompt: int, tokens: int, layers: int) -> st.SearchStrategy[Any]:
    """None, by reference, or where there is a row to write, inline."""
    rows = prompt + tokens - 1
    inline = st.just(np.arange(max(rows, 0) * layers * 2, dtype="<i2").reshape(-1, layers, 2))
    return st.none() | TEXT | inline if rows > 0 else st.none() | TEXT


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    shared: dict[str, Any] = {
        "messages": draw(st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=2)),
        "prompt_ids": np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=5)), "<i4"),
        "data_source": draw(st.none() | TEXT),
        "ground_truth": draw(JSON),
        "extra": draw(st.dictionaries(TEXT, JSON, max_size=2)),
        "tools": draw(st.none() | st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2)),
        "tool_choice": draw(st.none() | TEXT | st.dictionaries(TEXT, JSON, max_size=2)),
        "multimodal": draw(st.lists(MEDIA, max_size=2)),
    }
    states = []
    layers = draw(st.integers(1, 3))
    for index in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(0, 6))
        logprob = st.floats(-100, 0, width=32)
        mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens))
        states.append(
            RolloutState(
                **shared,
                index=index,
                response=draw(TEXT),
                response_ids=np.array(
                    draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens)),
                    "<i4",
                ),
                logprobs=np.array(draw(st.lists(logprob, min_size=tokens, max_size=tokens)), "<f4"),
                response_mask=mask,
                ref_logprobs=draw(floats(tokens)),
                values=draw(floats(tokens)),
                routed_experts=draw(experts(len(shared["prompt_ids"]), tokens, layers)),
                session_id=draw(st.none() | TEXT),
                tool_calls=draw(st.lists(CALLS, max_size=2)),
                spans=[VersionSpan(0, tokens, draw(st.integers(0, 2**40)), draw(TEXT))]
                if tokens
                else [],
                reward=draw(st.none() | st.dictionaries(TEXT, SCORES, max_size=2)),
                finish_reason=draw(st.none() | TEXT),
                status=draw(st.sampled_from(Status)),
                error=draw(st.none() | TEXT),
                sample_params=draw(PARAMS),
            )
        )
    return RolloutGroup("math-0000000007", "math", states)


def sample() -> RolloutGroup:
    shared: dict[str, Any] = {
        "messages": [{"role": "user", "content": "1 + 1 = ?"}],
        "prompt_ids": np.array([101, 102], "<i4"),
        "data_source": "sums",
        "ground_truth": "2",
        "extra": {"row": 7},
    }
    first = RolloutState(
        **shared, index=0, response="2", response_ids=[5, 6, 7], logprobs=[-0.5, -0.25, -2.0],
        response_mask=[1, 0, 1], spans=[VersionSpan(0, 1, 3, "l0"), VersionSpan(1, 2, 4, "l0")], reward={"score": 1.0},
        finish_reason="stop", status=Status.COMPLETED, sample_params=SampleParams(temperature=0.7, seed=11),
    )  # fmt: skip
    second = RolloutState(
        **shared, index=1, status=Status.ABORTED, finish_reason="abort", error="paused"
    )
    return RolloutGroup("sums-0000000007", "sums", [first, second])


def full() -> RolloutGroup:
    """A group with everything that a document may hold."""
    shared: dict[str, Any] = {
        "prompt_ids": np.array([101, 102], "<i4"),
        "tools": [{"name": "add", "parameters": {}}],
        "tool_choice": "auto",
        "multimodal": [
            MediaRef(
                kind="image", uri="file:///features/7.safetensors", tokens=2, grid_thw=[1, 2, 4]
            )
        ],
    }
    first = RolloutState(
        **shared, session_id="s0", response_ids=[5, 6], logprobs=[-1, -2], ref_logprobs=[-1.5, -2.5],
        values=[0.5, 0.25], tool_calls=[ToolCall(id="c0", name="add", arguments={"a": 1}, raw_arguments='{"a": 1}')],
        routed_experts=np.arange(12, dtype="<i2").reshape(3, 2, 2), status=Status.COMPLETED, reward={"score": 1},
    )  # fmt: skip
    second = RolloutState(
        **shared,
        index=1,
        response_ids=[7],
        logprobs=[-3],
        routed_experts="file:///experts/8",
        status=Status.COMPLETED,
    )
    return RolloutGroup("sums-0000000008", "sums", [first, second])


def document() -> dict[str, Any]:
    return dict(msgpack.unpackb(wire.encode(sample())))


def decode(changed: dict[str, Any]) -> RolloutGroup:
    return wire.decode(msgpack.packb(changed))


def read_whole(data: bytes | bytearray) -> Any:
    """By the library alone; what the quick reader accepts must be the same."""
    return msgpack.unpackb(data, strict_map_key=True)


@pytest.mark.parametrize("columns", [b"\x01", b"\x90", b"\xc0", b"\xa0", b"\x7f", b"\xde\x00\x00"])
def test_columns_that_are_no_small_map_are_left_to_the_library(columns: bytes) -> None:
    head = msgpack.packb(document())[: -len(msgpack.packb(document()["columns"]))]
    assert wire_reader._read_own(memoryview(head + columns)) is None
    # sixteen entries behind the head of a list
    lengths = msgpack.packb("lengths") + msgpack.packb({"dtype": "<i4", "data": b""})
    assert wire_reader._read_own(memoryview(head + b"\x90" + lengths * 16)) is None


def test_long_texts_and_columns_in_another_order_are_read_the_same() -> None:
    states = sample().states
    states[0].response = "long " * 50_000
    group = RolloutGroup("sums-0000000007", "sums", states)
    data = wire.encode(group)
    assert wire_reader._read_own(memoryview(data)) == read_whole(data)
    raw = read_whole(data)
    first = {"columns": dict(reversed(raw["columns"].items()))} | {
        k: v for k, v in raw.items() if k != "columns"
    }
    for other in (data, msgpack.packb(first)):
        assert [plain(state) for state in wire.decode(other).states] == [
            plain(state) for state in group.states
        ]


@settings(max_examples=150)
@given(groups())
def test_group_survives_the_wire(group: RolloutGroup) -> None:
    data = wire.encode(group)
    received = wire.decode(data)
    assert (received.gid, received.task, received.shared) == (group.gid, group.task, group.shared)
    assert [plain(s) for s in received.states] == [plain(s) for s in group.states]
    assert received.status == group.status
    np.testing.assert_array_equal(received.scores, group.scores)
    assert wire.encode(received) == data
    assert wire.encode(RolloutGroup(group.gid, group.task, received.states)) == data


def deep(levels: int) -> Any:
    inner: Any = None
    for _ in range(levels):
        inner = [inner]
    return inner


def break_span(group: RolloutGroup) -> None:
    group.members[0]["spans"] = [[0, 99, 0, "l0"]]


def break_logprob(group: RolloutGroup) -> None:
    group.logprobs = np.full(3, np.nan, "<f4")


def break_length(group: RolloutGroup) -> None:
    group.mask = np.zeros(2, "u1")


def break_token(group: RolloutGroup) -> None:
    group.prompt_ids = np.array([-1], "<i4")


def break_sample(group: RolloutGroup) -> None:
    group.members[1]["sample"] = {"top_p": 7}


def break_member(group: RolloutGroup) -> None:
    group.members[1]["more"] = 1


def break_nesting(group: RolloutGroup) -> None:
    group.shared["extra"] = {"x": deep(40)}


def break_count(group: RolloutGroup) -> None:
    group.shared["extra"] = {"x": [[]] * 300_000}


def break_tuples(group: RolloutGroup) -> None:
    inner: Any = None
    for _ in range(40):
        inner = (inner,)
    group.shared["extra"] = {"x": inner}


def break_key(group: RolloutGroup) -> None:
    group.shared["extra"] = {"x": {1: 2}}


def break_type(group: RolloutGroup) -> None:
    group.shared["extra"] = {"x": msgpack.ExtType(5, b"x")}


BREAKS = [
    break_span, break_logprob, break_length, break_token, break_sample, break_member, break_nesting, break_count,
    break_tuples, break_key, break_type,
]  # fmt: skip


@pytest.mark.parametrize("spoil", BREAKS)
def test_encode_checked_refuses_what_decode_refuses(spoil: Callable[[RolloutGroup], None]) -> None:
    group = wire.decode(wire.encode(sample()))
    assert wire.encode_checked(group) == wire.encode(sample())
    spoil(group)
    with pytest.raises(WireError) as expected:
        wire.decode(wire.encode(group))
    with pytest.raises(WireError) as caught:
        wire.encode_checked(group)
    assert str(caught.value) == str(expected.value)


def test_encode_checked_accepts_what_only_the_bytes_can_tell() -> None:
    group = wire.decode(wire.encode(sample()))
    group.members[0]["spans"] = tuple(tuple(span) for span in group.members[0]["spans"])
    assert wire.encode_checked(group) == wire.encode(sample())


def test_columns_are_views_of_the_received_bytes() -> None:
    data = wire.encode(sample())
    group = wire.decode(data)
    assert np.shares_memory(group.response_ids, np.frombuffer(data, "u1"))
    for column in (group.prompt_ids, group.response_ids, group.logprobs, group.mask, group.lengths):
        assert not column.flags.owndata
        assert not column.flags.writeable


def test_golden_file_is_read_by_plain_msgpack() -> None:
    """What any other language would do; the file only changes together with the schema version."""
    data = GOLDEN.read_bytes()
    raw = msgpack.unpackb(data)
    assert (raw["schema"], raw["gid"], raw["task"]) == (1, "sums-0000000007", "sums")
    assert raw["shared"] == {
        "messages": [{"role": "user", "content": "1 + 1 = ?"}],
        "data_source": "sums",
        "ground_truth": "2",
        "extra": {"row": 7},
    }
    assert raw["members"] == [
        {
            "index": 0,
            "status": "completed",
            "sample": {"temperature": 0.7, "seed": 11},
            "response": "2",
            "reward": {"score": 1.0},
            "finish_reason": "stop",
            "spans": [[0, 1, 3, "l0"], [1, 2, 4, "l0"]],
        },
        {
            "index": 1,
            "status": "aborted",
            "sample": {},
            "finish_reason": "abort",
            "error": "paused",
        },
    ]
    columns = {name: (column["dtype"], column["data"]) for name, column in raw["columns"].items()}
    assert columns == {
        "prompt_ids": ("<i4", struct.pack("<2i", 101, 102)),
        "lengths": ("<i4", struct.pack("<2i", 3, 0)),
        "response_ids": ("<i4", struct.pack("<3i", 5, 6, 7)),
        "logprobs": ("<f4", struct.pack("<3f", -0.5, -0.25, -2.0)),
        "mask": ("|u1", bytes([1, 0, 1])),
    }
    assert wire.encode(sample()) == data
    assert [plain(s) for s in wire.decode(data).states] == [plain(s) for s in sample().states]


def test_optional_columns_are_plain_msgpack_too() -> None:
    raw = msgpack.unpackb(GOLDEN_FULL.read_bytes())
    assert wire.encode(full()) == GOLDEN_FULL.read_bytes()
    columns = raw["columns"]
    assert columns["routed_experts"] == {
        "dtype": "<i2",
        "data": struct.pack("<12h", *range(12)),
        "shape": [3, 2, 2],
    }
    assert columns["values"]["data"] == struct.pack("<3f", 0.5, 0.25, float("nan"))
    assert [member["routed_experts"] for member in raw["members"]] == [True, "file:///experts/8"]
    assert raw["shared"]["multimodal"] == [
        {
            "kind": "image",
            "uri": "file:///features/7.safetensors",
            "tokens": 2,
            "grid_thw": [1, 2, 4],
        }
    ]
    assert raw["members"][0]["tool_calls"] == [
        {"id": "c0", "name": "add", "arguments": {"a": 1}, "raw_arguments": '{"a": 1}'}
    ]


def test_optional_columns_lie_beside_the_others_for_the_trainer() -> None:
    group = wire.decode(wire.encode(full()))
    assert group.ref_logprobs is not None
    assert group.values is not None
    assert group.routed_experts is not None
    np.testing.assert_array_equal(group.ref_logprobs, np.array([-1.5, -2.5, np.nan], "<f4"))
    np.testing.assert_array_equal(group.values, np.array([0.5, 0.25, np.nan], "<f4"))
    assert group.routed_experts.shape == (3, 2, 2)
    assert not group.routed_experts.flags.owndata
    assert group.states[1].values is None
    assert group.states[1].routed_experts == "file:///experts/8"
    plainest = wire.decode(wire.encode(sample()))
    assert (plainest.ref_logprobs, plainest.values, plainest.routed_experts) == (None, None, None)


def test_experts_of_different_models_are_refused() -> None:
    states = full().states
    states[1].routed_experts = np.zeros((2, 3, 2), "<i2")
    with pytest.raises(WireError, match="different shapes"):
        RolloutGroup("sums-0000000008", "sums", states)


def test_mask_is_left_out_when_every_token_is_trained() -> None:
    states = sample().states
    states[0].response_mask = None
    raw = msgpack.unpackb(wire.encode(RolloutGroup("sums-0000000007", "sums", states)))
    assert "mask" not in raw["columns"]
    assert wire.decode(msgpack.packb(raw)).mask.tolist() == [1, 1, 1]


@pytest.mark.parametrize("schema", [0, 2, "1", None, [], {}])
def test_other_schema_versions_are_refused_by_name(schema: object) -> None:
    with pytest.raises(SchemaVersionError, match="reads 1"):
        decode(document() | {"schema": schema})


NAN = struct.pack("<3f", -0.5, float("nan"), -2.0)
INFINITE = struct.pack("<3f", -0.5, float("-inf"), -2.0)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("gid",), 7, "gid"),
        (("more",), 1, "more"),
        (("members",), [], "members"),
        (("members", 0, "status"), "done", "members.0.status"),
        (("members", 0, "status"), "x" * 10_000, "members.0.status"),
        (("members", 0, "index"), -1, "members.0.index"),
        (("members", 0, "reward"), {"score": float("nan")}, "members.0.reward"),
        (("members", 0, "reward"), {"score": float("inf")}, "members.0.reward"),
        (("members", 0, "reward"), {"score": 1e39}, "members.0.reward"),
        (("members", 0, "reward"), {"score": "1"}, "members.0.reward"),
        (("members", 0, "spans"), [[0, 4, 0, "l"]], "outside of 3"),
        (("members", 0, "spans"), [[-1, 1, 0, "l"]], "members.0.spans.0.0"),
        (("members", 0, "spans"), [[0, 1, -1, "l"]], "members.0.spans.0.2"),
        (("members", 0, "spans"), [[0, 1, 2**60, "l"]], "members.0.spans.0.2"),
        (("members", 0, "spans"), [[0, 1, True, "l"]], "members.0.spans"),
        (("members", 0, "spans"), [[0, 1]], "members.0.spans"),
        (("members", 1, "spans"), [[0, 1, 0, "l"]], "members.1.spans"),
        (("members", 0, "sample"), {"top_q": 1}, "members.0.sample"),
        (("members", 0, "sample"), {"top_p": 7}, "members.0.sample"),
        (("columns", "lengths", "data"), struct.pack("<2i", 3, 1), "for 4 response tokens"),
        (("columns", "lengths", "data"), struct.pack("<2i", 4, -1), "negative"),
        (("columns", "lengths", "data"), struct.pack("<3i", 3, 0, 0), "for 2 members"),
        (
            ("columns", "lengths", "data"),
            struct.pack("<2i", 2**31 - 1, 2**31 - 1),
            "response tokens",
        ),
        (("columns", "response_ids", "data"), bytes(13), "not a multiple"),
        (("columns", "response_ids", "data"), struct.pack("<3i", 1, -1, 1), "negative token"),
        (("columns", "prompt_ids", "data"), struct.pack("<1i", -1), "negative token"),
        (("columns", "response_ids", "dtype"), "<i8", "dtype"),
        (("columns", "response_ids", "data"), [1, 2, 3], "columns.response_ids.data"),
        (("columns", "logprobs", "data"), NAN, "logprobs"),
        (("columns", "logprobs", "data"), INFINITE, "logprobs"),
        (("columns", "mask", "data"), bytes([1, 2, 1]), "mask"),
        (
            ("columns", "advantages"),
            {"dtype": "<f4", "data": b""},
            "at columns: .*unknown field `advantages`",
        ),
        (("columns", "values"), {"dtype": "<f4", "data": b""}, "0 values for 3"),
        (("columns", "values"), {"dtype": "<f4", "data": INFINITE}, "columns.values: an infinite"),
        (("columns", "values"), {"dtype": "<f4", "data": NAN}, "NaN for some"),
        (
            ("columns", "ref_logprobs"),
            {"dtype": "<f4", "data": struct.pack("<3f", *[float("nan")] * 3)},
            "no member",
        ),
        (("columns", "ref_logprobs"), {"dtype": "<f8", "data": bytes(24)}, "dtype"),
        (("columns", "logprobs", "shape"), [3], "only routed_experts"),
        (
            ("columns", "routed_experts"),
            {"dtype": "<i2", "data": bytes(8), "shape": [4, 1, 1]},
            "members have 0",
        ),
        (("members", 0, "routed_experts"), True, "0 rows, its members have 4"),
        (("members", 0, "routed_experts"), False, "members.0.routed_experts"),
        (("members", 0, "routed_experts"), [1], "members.0.routed_experts"),
        (("members", 0, "session_id"), 7, "members.0.session_id"),
        (("members", 0, "tool_calls"), [{"id": "a"}], "members.0.tool_calls.0: .*`name`"),
        (
            ("members", 0, "tool_calls"),
            [{"id": "a", "name": "b", "type": "function"}],
            "tool_calls.0: .*`type`",
        ),
        (("shared", "tools"), [7], "shared.tools"),
        (("shared", "tool_choice"), 7, "shared.tool_choice"),
        (("shared", "multimodal"), [{"kind": "smell", "uri": "x"}], "shared.multimodal.0.kind"),
        (("shared", "multimodal"), [{"kind": "image", "uri": ""}], "shared.multimodal.0.uri"),
        (("shared", "multimodal"), [{"kind": "image", "uri": "x", "grid_thw": [1, 2]}], "grid_thw"),
    ],
)
def test_inconsistent_documents_are_refused_with_the_place(
    place: tuple[Any, ...], value: object, said: str
) -> None:
    changed = document()
    inner: Any = changed
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    with pytest.raises(WireError, match=said) as caught:
        decode(changed)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": [3, 4]}, "for 12 values"),
        ({"shape": [3, 2, 3]}, "for 12 values"),
        ({"shape": [-3, -2, 2]}, "for 12 values"),
        ({"shape": [2**40, 2**40, 2**40]}, "for 12 values"),
        ({"shape": None}, "for 12 values"),
        ({"shape": [6, 1, 2]}, "6 rows, its members have 3"),
        ({"data": struct.pack("<12h", *range(11), -1)}, "negative expert"),
        ({"dtype": "<i4"}, "dtype"),
    ],
)
def test_inconsistent_experts_are_refused(changes: dict[str, Any], said: str) -> None:
    raw = msgpack.unpackb(wire.encode(full()))
    raw["columns"]["routed_experts"] |= changes
    with pytest.raises(WireError, match=said):
        decode(raw)


@pytest.mark.parametrize("name", ["prompt_ids", "lengths", "response_ids", "logprobs"])
def test_missing_columns_are_named(name: str) -> None:
    changed = document()
    del changed["columns"][name]
    with pytest.raises(WireError, match=name):
        decode(changed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"[]",
        b"\x90",
        b"\xc0",
        b"\x81\x01\x02",
        wire.encode(sample()) + b"\x00",
        msgpack.packb({"schema": 1, "x": msgpack.ExtType(5, b"abcd")}),
        msgpack.packb({"schema": 1, "x": msgpack.Timestamp(1, 2)}),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x81\xa1\xff\x01",
    ],
)
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(data)


@pytest.mark.parametrize("depth", [40, 300, 1000, 5000, 100_000])
@pytest.mark.parametrize("where", ["extra", "spans", "schema", "sample"])
def test_nesting_bombs_are_refused(depth: int, where: str) -> None:
    bomb = b"\x91" * depth + b"\xc0"
    keys = {
        "schema": b"\x81\xa6schema" + bomb,
        "extra": b"\x82\xa6schema\x01\xa6shared\x81\xa5extra\x81\xa1x" + bomb,
        "spans": b"\x82\xa6schema\x01\xa7members\x91\x81\xa5spans\x91\x91" + bomb,
        "sample": b"\x82\xa6schema\x01\xa7members\x91\x81\xa6sample\x81\xa4seed" + bomb,
    }
    with pytest.raises(WireError):
        wire.decode(keys[where])
    if where == "extra" and depth <= 300:
        with pytest.raises(WireError, match="nested"):
            decode(document() | {"shared": {"extra": {"x": deep(depth)}}})


@pytest.mark.parametrize(
    "filling", [b"\x80", b"\x90", b"\x91\xc0", b"\xdd\x00\x04\x00\x00", b"\xdd\x00\x4c\x4b\x40"]
)
def test_five_megabytes_of_containers_do_not_fill_the_memory(filling: bytes) -> None:
    data = (b"\xdd" + struct.pack(">I", 5_000_000) + filling * 5_000_000)[:5_000_000]
    nested = b"\x81\xa1x" + b"".join(b"\xdc\xff\xff" + filling * 65_535 for _ in range(1)) * 70
    tracemalloc.start()
    for bomb in (data, nested[:5_000_000]):
        with pytest.raises(WireError):
            wire.decode(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6


def test_too_large_documents_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_reader, "MAX_BYTES", 100)
    with pytest.raises(WireError, match="at most 100"):
        wire.decode(bytes(101))


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_random_bytes_never_do_worse_than_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(data)


@pytest.mark.parametrize("make", [sample, full])
def test_mutated_documents_never_do_worse_than_a_wire_error(
    make: Callable[[], RolloutGroup],
) -> None:
    dice = random.Random(7)
    whole = wire.encode(make())
    accepted = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            place = dice.randrange(len(data))
            match dice.randrange(4):
                case 0:
                    data[place] = dice.randrange(256)
                case 1:
                    del data[place : place + dice.randint(1, 9)]
                case 2:
                    data[place:place] = dice.randbytes(dice.randint(1, 5))
                case _:
                    data[place] ^= 1 << dice.randrange(8)
            if not data:
                break
        accepted += keep(bytes(data))
    assert accepted > 10


ODD: tuple[Any, ...] = (
    [[]],
    [0, 1, 0, "l0"],
    {"score": float("nan")},
    {"dtype": "<i4", "data": bytes(12)},
    "<i2",
    "init",
)
ANYTHING = JSON | st.binary(max_size=40) | st.floats() | st.sampled_from(ODD)


@settings(max_examples=250)
@given(st.data())
def test_documents_with_anything_anywhere_never_do_worse_than_a_wire_error(
    data: st.DataObject,
) -> None:
    document = msgpack.unpackb(wire.encode(data.draw(st.sampled_from([sample, full]))()))
    for _ in range(data.draw(st.integers(1, 3))):
        inner = document
        place = data.draw(st.sampled_from(sorted(document)))
        while (
            isinstance(inner[place], dict | list)
            and inner[place]
            and data.draw(st.booleans() | st.just(True))
        ):
            inner = inner[place]
            places = sorted(inner) if isinstance(inner, dict) else range(len(inner))
            place = data.draw(st.sampled_from(places))
        match data.draw(st.integers(0, 4)):
            case 0:
                del inner[place]
            case 1 if isinstance(inner, list):
                inner.append(deepcopy(data.draw(ANYTHING)))
            case 1:
                inner[data.draw(TEXT)] = deepcopy(data.draw(ANYTHING))
            case _:
                inner[place] = deepcopy(data.draw(ANYTHING))
        if not document:
            break
    keep(msgpack.packb(document))


@pytest.mark.parametrize("thing", [object(), {1, 2}, np.float32(1), 2**70])
def test_what_msgpack_cannot_hold_is_a_wire_error(thing: object) -> None:
    states = sample().states
    states[0].ground_truth = thing
    with pytest.raises(WireError, match="sums-0000000007"):
        wire.encode(RolloutGroup("sums-0000000007", "sums", states))


def test_threads_may_decode_their_first_group_at_the_same_moment() -> None:
    """A worker's threads do. msgspec dereferenced a null pointer there, which no thread can catch."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-m", "tests.buffer.model.decode_at_once"], cwd=ROOT, check=False
        )
        assert done.returncode == 0
