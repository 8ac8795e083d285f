from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import ValidationError

from buffer.errors import WireError
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import (
    OF_RESPONSE,
    MediaRef,
    PolicyVersion,
    RolloutState,
    Status,
    ToolCall,
    VersionSpan,
    group_status,
)
from buffer.wire.sampling import SampleParams, StructuredOutput
from buffer.wire.sampling_mask import SamplingMask


def state(tokens: int = 3, **fields: Any) -> RolloutState:
    ids = np.arange(tokens, dtype="<i4")
    logprobs = -np.ones(tokens, "<f4")
    return RolloutState(response_ids=ids, logprobs=logprobs, **fields)


def test_columns_become_little_endian_arrays() -> None:
    made = RolloutState(prompt_ids=[1, 2], response_ids=[3], logprobs=[-1], response_mask=[True])
    assert made.prompt_ids is not None
    assert made.response_mask is not None
    columns: list[Any] = [made.prompt_ids, made.response_ids, made.logprobs, made.response_mask]
    assert [column.dtype.str for column in columns] == ["<i4", "<i4", "<f4", "|u1"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": [0.0]},
        {"response_mask": [1]},
        {"spans": [VersionSpan(2, 2, 0, "l")]},
        {"spans": [VersionSpan(-1, 2, 0, "l")]},
        {"ref_logprobs": [0.0]},
        {"values": [0.0] * 4},
        {"teacher_logprobs": {"t": [0.0]}},
        {"teacher_top_ids": {"t": [[1]] * 3}, "teacher_top_logprobs": {"t": [[0]] * 3}},
        {"teacher_logprobs": {"t": [0] * 3}, "teacher_top_ids": {"t": [[1]] * 3}},
        {
            "teacher_logprobs": {"t": [0] * 3},
            "teacher_top_ids": {"t": [[1, 2]] * 3},
            "teacher_top_logprobs": {"t": [[0]] * 3},
        },
        {"routed_experts": [[[1]]]},
        {"routed_experts": [1, 2]},
        {"sampling_mask": SamplingMask(np.array([1, 0]), np.array([1]))},
        {"tool_calls": [{"id": "a"}]},
        {"multimodal": [{"kind": "image", "uri": "x", "pixels": []}]},
        {"unknown": 1},
        {"index": -1},
    ],
)
def test_columns_that_disagree_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RolloutState(**({"response_ids": [1, 2, 3], "logprobs": [0, 0, 0]} | wrong))


def test_append_moves_spans_behind_what_is_there() -> None:
    made = state(2, spans=[VersionSpan(0, 2, 1, "a")], response_mask=[1, 0])
    made.append(
        np.array([7], "<i4"),
        np.array([-2.0], "<f4"),
        [VersionSpan(0, 1, 3, "b"), VersionSpan(1, 0, 9, "b")],
    )
    assert made.response_ids.tolist() == [0, 1, 7]
    assert made.logprobs.tolist() == [-1, -1, -2]
    assert made.response_mask is not None
    assert made.response_mask.tolist() == [1, 0, 1]
    assert made.spans == [VersionSpan(0, 2, 1, "a"), VersionSpan(2, 1, 3, "b")]
    assert made.oldest_version() == 1


def test_append_forgets_columns_that_no_longer_cover_all_tokens() -> None:
    made = state(
        1,
        prompt_ids=[1, 2],
        values=[0.5],
        ref_logprobs=[-1],
        token_rewards=[1],
        teacher_logprobs={"large": [-1]},
        routed_experts=np.ones((2, 1, 1)),
        response_mask=[1],
    )
    made.append(np.array([], "<i4"), np.array([], "<f4"), [])
    assert made.values is not None
    made.append(
        np.array([7], "<i4"), np.array([-2.0], "<f4"), [], routed_experts=np.zeros((3, 1, 1), "<i2")
    )
    forgotten: list[Any] = [made.values, made.ref_logprobs, made.teacher_logprobs]
    assert forgotten == [None] * 3
    assert made.token_rewards is not None
    assert made.token_rewards.tolist() == [1, 0], "a new token has no reward"
    assert isinstance(made.routed_experts, np.ndarray)
    assert made.routed_experts.ravel().tolist() == [1, 1, 0]  # what is there stays
    made.append(np.array([7], "<i4"), np.array([-2.0], "<f4"), [])
    assert made.routed_experts is None


def test_stamp_names_the_weights_of_new_tokens_only() -> None:
    made = state(2)
    assert made.stamp(PolicyVersion("a", 1)) == 2
    assert made.stamp(PolicyVersion("a", 9)) == 0
    made.append(np.array([7, 8, 9], "<i4"), np.zeros(3, "<f4"), [])
    assert made.stamp(PolicyVersion("b", 3)) == 3
    assert made.spans == [VersionSpan(0, 2, 1, "a"), VersionSpan(2, 3, 3, "b")]
    assert made.oldest_version() == 1
    empty = state(0)
    assert empty.stamp(PolicyVersion("a", 1)) == 0
    assert empty.oldest_version() is None


OF_THE_PROMPT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "?"}], "tools": [{"name": "add"}], "tool_choice": "auto",
    "multimodal": [MediaRef("image", "x")], "data_source": "sums", "ground_truth": "4", "extra": {"row": 1},
    "index": 3, "session_id": "s", "sample_params": SampleParams(top_k=5), "prompt_ids": [1],
}  # fmt: skip
OF_THE_RESPONSE: dict[str, Any] = {
    "role": "solver", "response": "r", "tool_calls": [ToolCall("c", "add")], "response_mask": [1, 0, 1], "values": [0, 0, 0],
    "ref_logprobs": [0, 0, 0], "token_rewards": [0, 0, 1], "teacher_logprobs": {"t": [0, 0, 0]}, "sampling_mask": "file:///m",
    "teacher_top_ids": {"t": [[1], [2], [3]]}, "teacher_top_logprobs": {"t": [[0], [0], [0]]}, "routed_experts": "file:///e", "spans": [VersionSpan(0, 3, 1, "a")], "columns": {},
    "reward": {"score": 1}, "finish_reason": "abort", "status": Status.ABORTED, "error": "e",
}  # fmt: skip


def test_reset_forgets_the_response_and_keeps_the_prompt() -> None:
    """Every field is of one of the two, so a new one cannot be forgotten here."""
    assert {*OF_THE_PROMPT, *OF_THE_RESPONSE, "response_ids", "logprobs"} == set(
        RolloutState.model_fields
    )
    made = state(**OF_THE_PROMPT, **OF_THE_RESPONSE)
    made.extra = {**made.extra, OF_RESPONSE: {"text": "r"}}
    made.reset_response()
    untouched = RolloutState(**OF_THE_PROMPT)
    for name in RolloutState.model_fields:
        np.testing.assert_array_equal(getattr(made, name), getattr(untouched, name), err_msg=name)
        assert type(getattr(made, name)) is type(getattr(untouched, name))


@pytest.mark.parametrize(
    ("statuses", "whole"),
    [
        (["completed", "completed"], "completed"), (["completed", "init"], "init"),
        (["init", "filtered"], "filtered"), (["filtered", "expired"], "expired"),
        (["expired", "aborted"], "aborted"), (["aborted", "failed"], "failed"),
    ],
)  # fmt: skip
def test_group_has_the_worst_status_of_its_members(statuses: list[str], whole: str) -> None:
    assert group_status(statuses) == whole
    assert (
        RolloutGroup("g-0000000000", "g", [state(status=Status(s)) for s in statuses]).status
        == whole
    )


def test_group_without_members_is_an_error() -> None:
    with pytest.raises(WireError):
        group_status([])
    with pytest.raises(WireError):
        RolloutGroup("g-0000000000", "g", [])


@pytest.mark.parametrize("received", [False, True])
def test_group_knows_its_oldest_versions(received: bool) -> None:
    spans = [
        [VersionSpan(0, 1, 9, "a"), VersionSpan(1, 2, 4, "b")],
        [VersionSpan(0, 0, 1, "a"), VersionSpan(0, 3, 8, "a")],
    ]
    group = RolloutGroup("g-0000000000", "g", [state(spans=s) for s in spans] + [state()])
    group = group_bytes.decode(group_bytes.encode(group)) if received else group
    assert group.oldest() == VersionSpan(1, 2, 4, "b")
    assert group.oldest_by_lineage() == {"a": 8, "b": 4}
    assert RolloutGroup("g-0000000000", "g", [state()]).oldest_by_lineage() == {}


def test_scores_are_nan_where_nothing_was_judged() -> None:
    rewards = [{"score": 0.5}, None, {"length": 1.0}]
    group = RolloutGroup("g-0000000000", "g", [state(reward=reward) for reward in rewards])
    assert group.scores.dtype == np.float32
    np.testing.assert_array_equal(group.scores, np.array([0.5, np.nan, np.nan], "<f4"))


def test_policy_version_reads_what_it_writes() -> None:
    for version in (PolicyVersion("a", 0), PolicyVersion("a:b", 12)):
        assert PolicyVersion.parse(str(version)) == version
    with pytest.raises(ValueError, match="invalid literal"):
        PolicyVersion.parse("a:x")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"stops": "a"}),
        {"structured": StructuredOutput.model_construct(regex="a", choice=["b"])},
    ],
)
def test_wrong_sample_params_are_refused_when_a_group_is_written(wrong: dict[str, Any]) -> None:
    state = RolloutState(sample_params=SampleParams(**wrong))
    with pytest.raises(WireError, match=f"at shared.sample.{next(iter(wrong))}"):
        group_bytes.encode_checked(RolloutGroup("math-0000000001", "math", [state]))


@pytest.mark.parametrize(
    "ids", [[2**31], [-(2**31) - 1], np.array([2**32 + 7]), [2**70], [1.5], [float("nan")], ["a"]]
)
def test_token_ids_that_do_not_fit_are_refused_and_never_cut(ids: Any) -> None:
    for column in ("prompt_ids", "response_ids"):
        with pytest.raises(ValidationError, match=column):
            RolloutState(**{column: ids, "logprobs": [0.0] if column == "response_ids" else []})
    with pytest.raises(ValueError):  # noqa: PT011 (numpy's own for a text)
        RolloutState().append(ids, np.zeros(1, "<f4"), [])


ROOT = Path(__file__).parents[3]
GOLDEN = sorted((ROOT / "tests" / "buffer" / "golden").glob("*.msgpack"))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Every length that msgpack writes with a head of its own, up to 32 bits."""
    rewards = {"score": -0.125, "ratio": 1 / 3, "big": 2.0**40}
    states = [
        RolloutState(
            index=i, prompt_ids=np.arange(70_000), response="é" * 999 * i, response_ids=np.arange(999 * i),
            logprobs=np.full(999 * i, -0.5), status=Status.COMPLETED, reward=rewards,
            extra={"int": [-1, -33, -200, -40_000, -(2**40), 128, 300, 70_000, 2**40], "list": list(range(20))},
        )
        for i in range(17)
    ]  # fmt: skip
    path = tmp_path / "large.msgpack"
    path.write_bytes(group_bytes.encode(RolloutGroup("math-0000000001", "math", states)))
    return path


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
@pytest.mark.parametrize("which", [*GOLDEN, None], ids=lambda path: path.stem if path else "large")
def test_a_reader_in_javascript_finds_the_same(which: Path | None, large: Path) -> None:
    path = which or large
    reader = ROOT / "tests" / "readers" / "read_group.mjs"
    found = orjson.loads(
        subprocess.run(["node", reader, path], capture_output=True, check=True, timeout=400).stdout
    )
    group = group_bytes.decode(path.read_bytes())
    assert (found["gid"], found["task"], found["prompt"]) == (
        group.gid,
        group.task,
        group.prompt_ids.tolist(),
    )
    rollouts = [
        (
            s.index, s.status, s.response, s.reward, s.response_ids.tolist(),
            float(s.logprobs.sum(dtype="f8")),
        )
        for s in group.states
    ]  # fmt: skip
    assert [tuple(row.values()) for row in found["rollouts"]] == rollouts


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_reader_in_python_works_without_this_project(path: Path) -> None:
    program = ROOT / "tests" / "foreign" / "read_group.py"
    words: list[str | Path] = [sys.executable, "-I", program, path]
    said = subprocess.run(words, capture_output=True, check=True, timeout=400, text=True).stdout
    expected = [
        f"{s.index} {s.status} {s.reward} {s.response_ids.tolist()}"
        for s in group_bytes.decode(path.read_bytes()).states
    ]
    assert said.splitlines() == expected
