"""The wire format: round trips, and bytes from anywhere (I11)."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.errors import SchemaVersionError, WireError
from buffer.wire import group_bytes
from buffer.wire.document import NEEDED, Own, layout_of, pack, unpack
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import MediaRef, RolloutState, Status, ToolCall, VersionSpan
from buffer.wire.sampling import SampleParams, StructuredOutput
from proofs.fuzz.promise import keep, plain
from tests.thoroughness import examples

ROOT = Path(__file__).parents[3]

GOLDEN = Path(__file__).parents[1] / "golden" / "group_v3.msgpack"
GOLDEN_FULL = GOLDEN.with_name("group_v3_full.msgpack")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
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


OWN: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=2),
    "data_source": st.none() | TEXT,
    "ground_truth": JSON,
    "extra": st.dictionaries(TEXT, JSON, max_size=2),
    "tools": st.none() | st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2),
    "tool_choice": st.none() | TEXT | st.dictionaries(TEXT, JSON, max_size=2),
    "multimodal": st.lists(MEDIA, max_size=2),
}
"""What a rollout may have of its own, as others of the group do not."""


@st.composite
def teachers(draw: st.DrawFn, tokens: int, top_k: dict[str, int]) -> dict[str, Any]:
    """Columns of some teachers; of some of these, their top tokens."""
    logprobs = st.floats(-100, 0, width=32)
    column = st.lists(logprobs, min_size=tokens, max_size=tokens)
    given = draw(st.none() | st.dictionaries(st.sampled_from([*top_k]), column))
    made: dict[str, Any] = {"teacher_logprobs": given}
    tops = [name for name in given or () if top_k[name] and draw(st.booleans())]
    for what, values, dtype in (
        ("ids", st.integers(0, 2**31 - 1), "<i4"),
        ("logprobs", logprobs, "<f4"),
    ):
        rows = {n: (tokens, top_k[n]) for n in tops}
        made[f"teacher_top_{what}"] = {
            name: np.array(
                draw(st.lists(values, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])),
                dtype,
            ).reshape(shape)
            for name, shape in rows.items()
        } or None
    return made


def floats(tokens: int) -> st.SearchStrategy[list[float] | None]:
    return st.none() | st.lists(st.floats(-100, 100, width=32), min_size=tokens, max_size=tokens)


def experts(prompt: int, tokens: int, layers: int) -> st.SearchStrategy[Any]:
    """None, by reference, or where there is a row to write, inline."""
    rows = prompt + tokens - 1
    inline = st.just(np.arange(max(rows, 0) * layers * 2, dtype="<i2").reshape(-1, layers, 2))
    return st.none() | TEXT | inline if rows > 0 else st.none() | TEXT


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    shared: dict[str, Any] = {name: draw(values) for name, values in OWN.items()}
    shared["prompt_ids"] = np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=5)), "<i4")
    states = []
    layers = draw(st.integers(1, 3))
    top_k = {"large": draw(st.integers(0, 3)), "small": draw(st.integers(0, 3))}
    for index in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(0, 6))
        logprob = st.floats(-100, 0, width=32)
        mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens))
        changed = draw(st.sampled_from([None, *OWN]))
        texts = shared if changed is None else shared | {changed: draw(OWN[changed])}
        states.append(
            RolloutState(
                **texts,
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
                token_rewards=draw(floats(tokens)),
                **draw(teachers(tokens, top_k)),
                routed_experts=draw(experts(len(shared["prompt_ids"]), tokens, layers)),
                session_id=draw(st.none() | TEXT),
                role=draw(st.sampled_from(["", "proposer", "solver"])),
                tool_calls=draw(st.lists(CALLS, max_size=2)),
                spans=[VersionSpan(0, tokens, draw(st.integers(0, 2**40)), draw(TEXT))]
                if tokens
                else [],
                reward=draw(st.none() | st.dictionaries(TEXT, NUMBERS, max_size=2)),
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
        values=[0.5, 0.25], token_rewards=[0, 1], teacher_logprobs={"large": [-1, -2]},
        teacher_top_ids={"large": [[5, 6], [8, 6]]}, teacher_top_logprobs={"large": [[-1, -3], [-0.5, -2]]}, tool_calls=[ToolCall(id="c0", name="add", arguments={"a": 1}, raw_arguments='{"a": 1}')],
        routed_experts=np.arange(12, dtype="<i2").reshape(3, 2, 2), status=Status.COMPLETED, reward={"score": 1},
    )  # fmt: skip
    second = RolloutState(
        **shared,
        index=1,
        response_ids=[7],
        logprobs=[-3],
        teacher_logprobs={"large": [-3], "small": [-4]},
        teacher_top_ids={"small": [[9]]},
        teacher_top_logprobs={"small": [[-0.25]]},
        routed_experts="file:///experts/8",
        status=Status.COMPLETED,
    )
    return RolloutGroup("sums-0000000008", "sums", [first, second])


def document() -> dict[str, Any]:
    return dict(msgpack.unpackb(group_bytes.encode(sample())))


def decode(changed: dict[str, Any]) -> RolloutGroup:
    data = msgpack.packb(changed)
    keep(data)
    return group_bytes.decode(data)


def test_a_large_head_and_entries_in_another_order_are_read_the_same() -> None:
    states = sample().states
    states[0].response = "long " * 200_000
    group = RolloutGroup("sums-0000000007", "sums", states)
    data = group_bytes.encode(group)
    document = msgpack.unpackb(data)
    document["columns"] = dict(reversed(document["columns"].items()))
    reverse = dict(reversed(document.items()))
    for other in (data, msgpack.packb(reverse)):
        assert [plain(state) for state in group_bytes.decode(other).states] == [
            plain(state) for state in group.states
        ]


@settings(max_examples=examples(150))
@given(groups())
def test_group_survives_the_wire(group: RolloutGroup) -> None:
    data = group_bytes.encode(group)
    received = group_bytes.decode(data)
    assert (received.gid, received.task) == (group.gid, group.task)
    assert [plain(s) for s in received.states] == [plain(s) for s in group.states]
    assert received.status == group.status
    np.testing.assert_array_equal(received.scores, group.scores)
    assert group_bytes.encode(received) == group_bytes.encode_checked(group) == data
    assert group_bytes.encode(RolloutGroup(group.gid, group.task, received.states)) == data


def test_what_a_rollout_has_of_its_own_survives() -> None:
    states = sample().states
    states[1].extra = {"row": 7, "turns": 3}
    states[1].messages = [{"role": "user", "content": True}]
    states[0].messages = [{"role": "user", "content": 1}]
    received = group_bytes.decode(
        group_bytes.encode(RolloutGroup("sums-0000000007", "sums", states))
    ).states
    assert [state.extra for state in received] == [{"row": 7}, {"row": 7, "turns": 3}]
    assert [state.messages[0]["content"] for state in received] == [1, True]
    assert received[1].messages[0]["content"] is True  # equal to 1 in Python, and not the same


def deep(levels: int) -> Any:
    inner: Any = None
    for _ in range(levels):
        inner = [inner]
    return inner


def break_span(group: RolloutGroup) -> None:
    group.columns["spans"] = np.array([[0, 0, 99, 0, 0]])


def break_logprob(group: RolloutGroup) -> None:
    group.columns["logprobs"] = np.full(3, np.nan, "<f4")


def break_length(group: RolloutGroup) -> None:
    group.mask = np.zeros(2, "u1")


def break_token(group: RolloutGroup) -> None:
    group.columns["prompt_ids"] = np.array([-1], "<i4")


def break_sample(group: RolloutGroup) -> None:
    group.shared.sample = SampleParams(top_p=7)


def break_member(group: RolloutGroup) -> None:
    group.head.own.append((2, Own()))


def break_nesting(group: RolloutGroup) -> None:
    group.shared.extra = {"x": deep(40)}


def break_tuples(group: RolloutGroup) -> None:
    inner: Any = None
    for _ in range(40):
        inner = (inner,)
    group.shared.extra = {"x": inner}


def break_key(group: RolloutGroup) -> None:
    group.shared.extra = {"x": {1: 2}}


def break_type(group: RolloutGroup) -> None:
    group.shared.extra = {"x": msgspec.msgpack.Ext(5, b"x")}


def break_time(group: RolloutGroup) -> None:
    group.shared.extra = {"x": datetime(2026, 1, 1, tzinfo=UTC)}


BREAKS = [
    break_span, break_logprob, break_length, break_token, break_sample, break_member, break_nesting,
    break_tuples, break_key, break_type, break_time,
]  # fmt: skip


@pytest.mark.parametrize("spoil", BREAKS)
def test_encode_checked_refuses_what_decode_refuses(spoil: Callable[[RolloutGroup], None]) -> None:
    group = group_bytes.decode(group_bytes.encode(sample()))
    assert group_bytes.encode_checked(group) == group_bytes.encode(sample())
    spoil(group)
    with pytest.raises(WireError) as expected:
        group_bytes.decode(group_bytes.encode(group))
    with pytest.raises(WireError) as caught:
        group_bytes.encode_checked(group)
    assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize("spoil", BREAKS)
def test_a_bad_group_among_others_has_the_error_that_it_has_alone(
    spoil: Callable[[RolloutGroup], None],
) -> None:
    good = [group_bytes.encode(made) for made in (sample(), full())]
    group = sample()
    spoil(group)
    bad = group_bytes.encode(group)
    with pytest.raises(WireError) as alone:
        group_bytes.decode(bad)
    with pytest.raises(WireError) as among:
        group_bytes.decode_each([good[0], bad, good[1]], ["", "", ""])
    assert str(among.value) == str(alone.value)


def test_columns_are_views_of_the_received_bytes() -> None:
    data = group_bytes.encode(sample())
    group = group_bytes.decode(data)
    assert np.shares_memory(group.response_ids, np.frombuffer(data, "u1"))
    for column in (group.prompt_ids, group.response_ids, group.logprobs, group.mask, group.lengths):
        assert not column.flags.owndata
        assert not column.flags.writeable
        assert column.flags.aligned


def columns_of(raw: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of every column, as any other language would find them."""
    return {
        name: raw["data"][offset : offset + math.prod(shape) * layout_of(name).dtype.itemsize]
        for name, (offset, *shape) in raw["columns"].items()
    }


def test_golden_file_is_read_by_plain_msgpack() -> None:
    """What any other language would do; the file only changes together with the schema version."""
    data = GOLDEN.read_bytes()
    raw = msgpack.unpackb(data)
    assert next(iter(raw)) == "schema"
    assert list(raw)[-1] == "data"
    columns = columns_of(raw)
    assert data.index(raw["data"]) % 8 == 0
    assert {name: raw[name] for name in raw if name not in ("columns", "pad", "data")} == {
        "schema": 3,
        "gid": "sums-0000000007",
        "task": "sums",
        "shared": {
            "messages": [{"role": "user", "content": "1 + 1 = ?"}],
            "data_source": "sums",
            "ground_truth": "2",
            "extra": {"row": 7},
            "sample": {"temperature": 0.7, "seed": 11},
        },
        "own": [[1, {"sample": {}, "error": "paused"}]],
        "responses": ["2", ""],
        "finish_reasons": ["stop", "abort"],
        "lineages": ["l0"],
        "rewards": ["score"],
    }
    assert columns == {
        "spans": struct.pack("<10q", 0, 0, 1, 3, 0, 0, 1, 2, 4, 0),
        "rewards": struct.pack("<2d", 1, float("nan")),
        "indices": struct.pack("<2i", 0, 1),
        "lengths": struct.pack("<2i", 3, 0),
        "prompt_ids": struct.pack("<2i", 101, 102),
        "response_ids": struct.pack("<3i", 5, 6, 7),
        "logprobs": struct.pack("<3f", -0.5, -0.25, -2.0),
        "statuses": bytes([1, 2]),
        "finishes": bytes([0, 1]),
        "mask": bytes([1, 0, 1]),
    }
    assert group_bytes.encode(sample()) == data
    assert [plain(s) for s in group_bytes.decode(data).states] == [
        plain(s) for s in sample().states
    ]


def test_optional_columns_are_plain_msgpack_too() -> None:
    raw = msgpack.unpackb(GOLDEN_FULL.read_bytes())
    assert group_bytes.encode(full()) == GOLDEN_FULL.read_bytes()
    columns = columns_of(raw)
    assert columns["routed_experts/rows"] == struct.pack("<12h", *range(12))
    assert raw["columns"]["routed_experts/rows"][1:] == [3, 2, 2]
    nan = float("nan")
    assert columns["values"] == struct.pack("<3f", 0.5, 0.25, nan)
    assert columns["teacher_logprobs/large"] == struct.pack("<3f", -1, -2, -3)
    assert columns["teacher_logprobs/small"] == struct.pack("<3f", nan, nan, -4)
    assert columns["teacher_top_ids/large"] == struct.pack("<6i", 5, 6, 8, 6, 0, 0)
    assert columns["teacher_top_logprobs/large"] == struct.pack("<6f", -1, -3, -0.5, -2, nan, nan)
    tops = group_bytes.decode(GOLDEN_FULL.read_bytes()).optional_columns()
    assert tops["teacher_top_ids/small"].tolist() == [[0], [0], [9]]
    assert tops["teacher_top_logprobs/large"][:2].tolist() == [[-1, -3], [-0.5, -2]]
    assert columns["routed_experts/of"] == bytes([1, 0])
    assert raw["own"][1] == [1, {"files": {"routed_experts": "file:///experts/8"}}]
    assert raw["shared"]["multimodal"] == [
        {
            "kind": "image",
            "uri": "file:///features/7.safetensors",
            "tokens": 2,
            "grid_thw": [1, 2, 4],
        }
    ]
    assert raw["own"][0][1]["tool_calls"] == [
        {"id": "c0", "name": "add", "arguments": {"a": 1}, "raw_arguments": '{"a": 1}'}
    ]


def test_experts_of_different_models_are_refused() -> None:
    states = full().states
    states[1].routed_experts = np.zeros((2, 3, 2), "<i2")
    with pytest.raises(WireError, match="different shapes"):
        RolloutGroup("sums-0000000008", "sums", states)


def test_mask_is_left_out_when_every_token_is_trained() -> None:
    states = sample().states
    states[0].response_mask = None
    raw = msgpack.unpackb(group_bytes.encode(RolloutGroup("sums-0000000007", "sums", states)))
    assert "mask" not in raw["columns"]
    assert group_bytes.decode(msgpack.packb(raw)).mask.tolist() == [1, 1, 1]


@pytest.mark.parametrize("schema", [0, 1, 2, 4, "3", None, [], {}])
def test_other_schema_versions_are_refused_by_name(schema: object) -> None:
    with pytest.raises(SchemaVersionError, match="reads 3"):
        decode(document() | {"schema": schema})


NAN = [-0.5, float("nan"), -2.0]
INFINITE = [-0.5, float("-inf"), -2.0]


def with_column(raw: dict[str, Any], name: str, values: Any) -> dict[str, Any]:
    columns = unpack(raw["columns"], memoryview(raw["data"]))
    columns[name] = np.array(values, layout_of(name).dtype)
    directory, pieces, _ = pack(columns)
    return raw | {"columns": directory, "data": b"".join(pieces)}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("gid",), 7, "gid"),
        (("more",), 1, "more"),
        (("responses",), [], "responses"),
        (("responses",), ["a"], "position 1 of 1 rollouts"),
        (("responses",), ["a"] * 3, "of 3 rollouts"),
        (("responses",), ["a", 7], "responses.1"),
        (("finish_reasons",), [], "finish_reasons need"),
        (("finish_reasons",), ["stop", "stop"], "twice"),
        (("lineages",), [], "lineages need"),
        (("rewards",), [], "rewards need"),
        (("rewards",), ["a", "a"], "twice"),
        (("teachers",), ["a"], "teachers"),
        (("own",), [[2, {}]], "position 2 of 2"),
        (("own",), [[1, {}], [0, {}]], "position 0"),
        (("own", 0, 0), -1, "own.0.0"),
        (("own", 0, 1), {"more": 1}, "own.0.1: .*`more`"),
        (("own", 0, 1), {"session_id": 7}, "own.0.1.session_id"),
        (("own", 0, 1), {"role": "x" * 65}, "own.0.1.role"),
        (("own", 0, 1), {"files": [1]}, "own.0.1.files"),
        (("own", 0, 1), {"files": {"values": "a"}}, "the file of 'values'"),
        (("own", 0, 1), {"files": {"x" * 5000: "a"}}, "the file of 'xxx"),
        (("own", 0, 1), {"tool_calls": [{"id": "a"}]}, "tool_calls.0: .*`name`"),
        (("own", 0, 1), {"tool_calls": [{"id": "a", "name": "b", "type": 1}]}, "tool_calls.0"),
        (("shared", "sample"), {"top_q": 1}, "shared.sample"),
        (("shared", "sample"), {"top_p": 7}, "shared.sample"),
        (("shared", "tools"), [7], "shared.tools"),
        (("shared", "tool_choice"), 7, "shared.tool_choice"),
        (("shared", "multimodal"), [{"kind": "smell", "uri": "x"}], "shared.multimodal.0.kind"),
        (("shared", "multimodal"), [{"kind": "image", "uri": ""}], "shared.multimodal.0.uri"),
        (("shared", "multimodal"), [{"kind": "image", "uri": "x", "grid_thw": [1, 2]}], "grid_thw"),
        (("columns", "lengths"), [0], "at columns"),
        (("columns", "lengths"), [4, 2], "offset 4, expected a multiple of 8"),
        (("columns", "lengths"), [0, 2], "not below"),
        (("columns", "lengths"), [104, 2, 1], "2 dimensions, expected 1"),
        (("columns", "mask"), [2**40, 3], "it ends at"),
        (("columns", "mask"), [0, 2**62], "columns.mask"),
        (("columns", "mask"), [-8, 3], "at columns"),
        (("columns", "advantages"), [0, 0], "unknown column 'advantages'"),
        (("columns", "values/x"), [0, 0], "unknown column 'values/x'"),
        (("columns", "teacher_logprobs"), [0, 0], "unknown column 'teacher_logprobs'"),
        (("columns", "teacher_logprobs/"), [0, 0], "unknown column 'teacher_logprobs/'"),
        (("columns", f"teacher_logprobs/{'x' * 2000}"), [0, 0], "unknown column 'teacher_logp"),
        (("columns", "sampling_mask/more"), [0, 0], "unknown column 'sampling_mask/more'"),
        (("data",), "text", "data"),
        (("data",), b"", "it ends at"),
    ],
)
def test_inconsistent_documents_are_refused_with_the_path(
    path: tuple[Any, ...], value: object, said: str
) -> None:
    changed = document()
    inner: Any = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(WireError, match=said) as caught:
        decode(changed)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("indices", [0, -1], "negative"),
        ("statuses", [1, 7], "statuses: a value above 6"),
        ("finishes", [0, 2], "without a name"),
        ("finishes", [255, 255], "without a name"),
        ("rewards", [[1.0], [float("inf")]], "range of float32"),
        ("rewards", [[-1e39], [1.0]], "range of float32"),
        ("rewards", [[1.0]], "shape \\[1, 1\\], expected \\[2, 1\\]"),
        ("rewards", [[], []], "shape \\[2, 0\\], expected \\[2, 1\\]"),
        ("spans", [[0, 0, 4, 0, 0]], "within 2 rollouts"),
        ("spans", [[1, 0, 1, 0, 0]], "within 2 rollouts"),
        ("spans", [[0, -1, 1, 0, 0]], "within 2 rollouts"),
        ("spans", [[0, 0, 1, -1, 0]], "within 2 rollouts"),
        ("spans", [[0, 0, 1, 2**60, 0]], "within 2 rollouts"),
        ("spans", [[0, 2**52, 2**52, 0, 0]], "within 2 rollouts"),
        ("spans", [[2, 0, 1, 0, 0]], "within 2 rollouts"),
        ("spans", [[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]], "within 2 rollouts"),
        ("spans", [[0, 0, 1, 0, 1]], "within 2 rollouts"),
        ("spans", [[0, 0, 1, 0]], "expected .n, 5."),
        ("lengths", [3, 1], "with 4 response tokens"),
        ("lengths", [4, -1], "negative"),
        ("lengths", [3, 0, 0], "shape \\[3\\], expected \\[2\\]"),
        ("lengths", [2**31 - 1, 2**31 - 1], "response tokens"),
        ("response_ids", [1, -1, 1], "negative"),
        ("prompt_ids", [-1], "negative"),
        ("logprobs", NAN, "logprobs"),
        ("logprobs", INFINITE, "logprobs"),
        ("mask", [1, 2, 1], "mask"),
        ("values", [], "shape \\[0\\], expected \\[3\\]"),
        ("values", INFINITE, "columns.values: an infinite"),
        ("values", NAN, "no value for some"),
        ("token_rewards", NAN, "no value for some"),
        ("ref_logprobs", [float("nan")] * 3, "no rollout"),
        ("teacher_logprobs/big", NAN, "no value for some"),
        ("teacher_top_ids/big", [[1]] * 3, "need each other"),
        ("routed_experts/rows", [[[1]]] * 4, "need each other"),
        ("routed_experts/of", [1, 0], "need each other"),
    ],
)
def test_inconsistent_columns_are_refused_by_name(name: str, values: Any, said: str) -> None:
    with pytest.raises(WireError, match=said) as caught:
        decode(with_column(document(), name, values))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("routed_experts/rows", np.zeros((6, 1, 2)), "6 rows, its rollouts have 3"),
        ("routed_experts/rows", np.zeros((3, 0, 2)), "shape"),
        ("routed_experts/rows", np.full((3, 2, 2), -1), "a value below 0"),
        ("routed_experts/of", [0, 1], "3 rows, its rollouts have 2"),
        ("routed_experts/of", [1, 1], "3 rows, its rollouts have 5"),
        ("routed_experts/of", [0, 0], "need each other"),
        ("routed_experts/of", [2, 0], "neither 0 nor 1"),
        ("teacher_logprobs/small", [-1, np.nan, -4], "no value for some"),
        ("teacher_logprobs/small", [-1, -2], "shape \\[2\\], expected \\[3\\]"),
        ("teacher_top_ids/large", [[1]] * 3, "of one shape need each other"),
        ("teacher_top_ids/large", [[1, -3]] * 3, "negative"),
        ("teacher_top_logprobs/large", [[np.nan, np.nan]] * 3, "no rollout has"),
        ("teacher_top_logprobs/large", [[-1, np.nan]] * 3, "NaN for some of a value"),
        ("teacher_top_logprobs/large", [[-1, -2], [np.nan] * 2, [-1, -2]], "no value for some tokens"),
        ("teacher_top_logprobs/large", [[-1, -np.inf]] * 3, "infinite"),
    ],
)  # fmt: skip
def test_inconsistent_optional_columns_are_refused(name: str, values: Any, said: str) -> None:
    raw = msgpack.unpackb(group_bytes.encode(full()))
    with pytest.raises(WireError, match=said):
        decode(with_column(raw, name, values))


def test_tops_of_one_teacher_have_one_width() -> None:
    states = full().states
    states[1].teacher_top_ids = {"large": np.zeros((1, 3), "<i4")}
    states[1].teacher_top_logprobs = {"large": np.zeros((1, 3), "<f4")}
    with pytest.raises(WireError, match="different shapes"):
        RolloutGroup("sums-0000000008", "sums", states)


def test_an_address_beside_rows_of_experts_is_refused() -> None:
    raw = msgpack.unpackb(group_bytes.encode(full()))
    raw["own"][0][1]["files"] = {"routed_experts": "file:///experts/7"}
    with pytest.raises(WireError, match="values of the column"):
        decode(raw)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_no_numbers_are_refused(value: float) -> None:
    states = sample().states
    states[0].reward = {"score": value}
    with pytest.raises(WireError, match="reward"):
        group_bytes.encode_checked(RolloutGroup("sums-0000000007", "sums", states))


@pytest.mark.parametrize("name", NEEDED)
def test_missing_columns_are_named(name: str) -> None:
    changed = document()
    del changed["columns"][name]
    with pytest.raises(WireError, match=name):
        decode(changed)


@pytest.mark.parametrize("shape", [[0, 2**62, 3], [2**62, 4, 0], [0, 2**31, 2**31]])
def test_a_column_of_no_values_in_impossible_dimensions_is_refused(shape: list[int]) -> None:
    changed = document()
    changed["columns"]["routed_experts/rows"] = [len(changed["data"]) // 8 * 8, *shape]
    with pytest.raises(WireError, match=r"columns\.routed_experts"):
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
        group_bytes.encode(sample()) + b"\x00",
        msgpack.packb({"schema": 3, "x": msgpack.ExtType(5, b"abcd")}),
        msgpack.packb({"schema": 3, "x": msgpack.Timestamp(1, 2)}),
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
        group_bytes.decode(data)


@pytest.mark.parametrize("depth", [40, 300, 1000, 5000, 100_000])
@pytest.mark.parametrize("where", ["extra", "own", "schema", "sample"])
def test_nesting_bombs_are_refused(depth: int, where: str) -> None:
    bomb = b"\x91" * depth + b"\xc0"
    keys = {
        "schema": b"\x81\xa6schema" + bomb,
        "extra": b"\x82\xa6schema\x03\xa6shared\x81\xa5extra\x81\xa1x" + bomb,
        "own": b"\x82\xa6schema\x03\xa3own\x91\x92\x00\x81\xa5extra\x81\xa1x" + bomb,
        "sample": b"\x82\xa6schema\x03\xa6shared\x81\xa6sample\x81\xa4seed" + bomb,
    }
    with pytest.raises(WireError):
        group_bytes.decode(keys[where])
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
            group_bytes.decode(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6


def test_too_large_documents_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_bytes, "MAX_BYTES", 100)
    with pytest.raises(WireError, match="at most 100"):
        group_bytes.decode(bytes(101))


@pytest.mark.parametrize("make", [sample, full])
def test_mutated_documents_never_do_worse_than_a_wire_error(
    make: Callable[[], RolloutGroup],
) -> None:
    dice = random.Random(7)
    whole = group_bytes.encode(make())
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


ODD: tuple[Any, ...] = ([[]], [0, {"extra": {}}], [16, 2], [0, 2**40], b"", "stop", 2**62)
ANYTHING = JSON | st.binary(max_size=40) | st.floats() | st.sampled_from(ODD)


@settings(max_examples=examples(250))
@given(st.data())
def test_documents_with_anything_anywhere_never_do_worse_than_a_wire_error(
    data: st.DataObject,
) -> None:
    document = msgpack.unpackb(group_bytes.encode(data.draw(st.sampled_from([sample, full]))()))
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
    with pytest.raises(WireError, match=r"sums-0000000007|set is not part of the format"):
        group_bytes.encode_checked(RolloutGroup("sums-0000000007", "sums", states))


def test_threads_may_decode_their_first_group_at_the_same_moment() -> None:
    """A worker's threads do. msgspec dereferenced a null pointer there, which no thread can catch."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-m", "tests.buffer.wire.decode_at_once"], cwd=ROOT, check=False
        )
        assert done.returncode == 0
