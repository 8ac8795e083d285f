"""Columns that a package attaches (docs/pages/extensions.md), from the judge to the loss and back."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import orjson
import pytest
import torch

from buffer.curation.rollout_line import RolloutLine, group_of, lines_of
from buffer.errors import ConfigError, GroupChanged, JudgeError, WireError
from buffer.imports import attached
from buffer.wire import document, group_bytes
from buffer.wire.column import Column
from buffer.wire.columns import attached_columns
from buffer.wire.document import layout_of
from buffer.wire.group import RolloutGroup
from buffer.wire.group_json import group_json
from buffer.wire.own_copy import own_rollout, readers_copy
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from consumer.config.learner import LossConfig
from consumer.grpo.learner.batch_filter import BatchFilter
from consumer.grpo.learner.losses import Samples, TokenColumns, policy_loss
from consumer.grpo.policy.micro_batch import MicroBatch, Packer
from consumer.handle.batch import BatchTable
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.judges.judge import take_columns
from producer_workers.user_code.border import check_answer
from tests.memory_fault import overwrite
from tests.pipeline.conftest import make_yard, quick_looks
from tests.programs import ROOT

__all__ = ["make_yard", "quick_looks"]

PAGE = ROOT / "docs" / "pages" / "extensions.md"


def attach(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, points: str) -> None:
    """Make a package with one module, `doubt`, which attaches columns."""
    info = folder / "doubt-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubt\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[rolloutmq.columns]\n{points}")
    (folder / "doubt.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    forget()


def forget() -> None:
    sys.modules.pop("doubt", None)
    for cache in (attached, attached_columns, layout_of, document._numbers_of):
        cache.cache_clear()


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (code,) = re.findall(r'"rollout_extras/doubt.py"\n(.*?)```', PAGE.read_text("utf-8"), re.S)
    attach(tmp_path / "site", monkeypatch, code, "doubt = doubt:DOUBT\nlevel = doubt:LEVEL\n")
    yield importlib.import_module("doubt")
    monkeypatch.undo()
    forget()


def rollout(index: int, tokens: int, **columns: Any) -> RolloutState:
    return RolloutState(
        index=index,
        prompt_ids=[1, 2],
        response_ids=np.arange(5, 5 + tokens),
        logprobs=np.full(tokens, -0.5),
        spans=[VersionSpan(0, tokens, 1, "a")] if tokens else [],
        reward={"score": float(index)},
        finish_reason="stop",
        status=Status.COMPLETED,
        columns=columns,
    )


def loss_gradient(batch: MicroBatch) -> torch.Tensor:
    """Return the gradient of the page's objective, where each token has advantage 1."""
    ones = torch.ones_like(batch.rollout_logprobs)
    logprobs = batch.rollout_logprobs.clone().requires_grad_()
    columns = TokenColumns(
        logprobs=logprobs,
        old_logprobs=batch.rollout_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        advantages=ones,
        samples=Samples(batch.mask, batch.sample, batch.trained_tokens),
        entropy=torch.zeros_like(ones),
        optional=batch.optional,
        old_is_rollout=True,
    )
    loss, _ = policy_loss(columns, ones, LossConfig(objective="doubt:objective"))
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return logprobs.grad


def test_a_judges_columns_reach_the_loss_by_way_of_a_server(
    page: Any, make_yard: Callable[..., Any]
) -> None:
    yard = make_yard()

    async def scenario() -> str:
        (gid,) = yard.enqueue(1, tokens=(4, 2))
        async with yard.working(yard.worker(judge=page.judge)):
            await yard.until_stages(completed=1)
        return str(gid)

    group = yard.group(asyncio.run(scenario()))
    for state in group.states:
        assert state.columns["doubt"].tolist() == [0.5] * len(state.response_ids)
        assert state.columns["level"] == 3
        assert state.reward == {"score": 1.0}
    (batch,) = Packer(64).pack_pad_dispatch(BatchTable.of([group]))
    assert batch.column("doubt").tolist() == [0.5] * 6
    assert batch.column("level").tolist() == [3] * 6
    torch.testing.assert_close(loss_gradient(batch), torch.full((6,), -0.5))
    yard.check()


def test_an_agent_loops_columns_travel(page: Any, make_yard: Callable[..., Any]) -> None:
    class Loop(SingleTurnAgentLoop):
        async def generate_group(self, states: list[RolloutState], *args: Any) -> Any:
            made = await super().generate_group(states, *args)
            for state in made:
                state.columns = {"doubt": np.linspace(0, 1, len(state.response_ids))}
            return made

    yard = make_yard()

    async def scenario() -> str:
        (gid,) = yard.enqueue(1, tokens=(4, 2))
        async with yard.working(yard.worker(loop=Loop)):
            await yard.until_stages(completed=1)
        return str(gid)

    first, second = yard.group(asyncio.run(scenario())).states
    np.testing.assert_array_equal(first.columns["doubt"], np.linspace(0, 1, 4, dtype="<f4"))
    assert second.columns["doubt"].tolist() == [0, 1]


def test_groups_with_and_without_are_exported_shown_sealed_and_read_again(page: Any) -> None:
    states = [
        rollout(0, 3, doubt=[0, 0.25, 1], level=7),
        rollout(1, 2),
        rollout(2, 0, doubt=[]),
        rollout(3, 1, level=0),
    ]
    group = RolloutGroup("math-0000000001", "math", states)
    data = group_bytes.encode_checked(group)
    received = group_bytes.decode(memoryview(bytearray(data)).toreadonly())
    lines = [
        RolloutLine.model_validate_json(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY))
        for line in lines_of(received, "batch", 0)
        if line["response_ids"].size
    ]
    assert lines[0].columns == {"doubt": [0, 0.25, 1], "level": 7}
    shown = group_json(received, tokens=True)["members"][0]
    assert shown["columns"] == {"doubt": [0, 0.25, 1], "level": 7}
    copied = [readers_copy(own_rollout(state)) for state in received.states]
    again = RolloutGroup("math-0000000001", "math", copied)
    assert group_bytes.encode(again) == group_bytes.encode(received) == data
    lines = [line.model_copy(update={"samples": None}) for line in lines]
    lines = [line.model_copy(update={"index": n}) for n, line in enumerate(lines)]
    imported = group_of(lines, group.gid, "math")
    for made in (received, imported):
        values = {state.reward["score"]: state.columns for state in made.states if state.reward}
        assert values[0]["doubt"].tolist() == [0, 0.25, 1]
        assert (values[0]["level"], values[1], values[3]) == (7, {}, {"level": 0})
    with_other = BatchTable.of([received, RolloutGroup("math-0000000002", "math", [rollout(0, 2)])])
    (batch,) = Packer(64).pack_pad_dispatch(with_other)
    wanted = {5: (0, 7), 6: (0.25, 7), 7: (1, 7)}
    for sample, token, doubt, level in zip(
        batch.rollout[batch.sample].tolist(),
        batch.targets.tolist(),
        batch.column("doubt").tolist(),
        batch.column("level").tolist(),
        strict=True,
    ):
        without = (-2, 0 if sample == 3 else -1)
        assert (doubt if doubt == doubt else -2, level) == (
            wanted[token] if sample == 0 else without
        )
    overwrite(received.columns["doubt"])
    with pytest.raises(GroupChanged):
        received.check_unchanged()


def test_new_tokens_discard_it_and_a_column_that_nothing_reads_is_not_trained(page: Any) -> None:
    state = rollout(0, 2, doubt=[0, 1], level=7)
    group = RolloutGroup("math-0000000001", "math", [state])
    assert BatchFilter().apply([group]).groups == [group]
    with pytest.raises(ConfigError, match="token columns that the loss does not read"):
        BatchFilter(read_columns=frozenset({"level"})).apply([group])
    recorded = {"doubt": np.array([0.5], "<f4")}
    state.append(np.array([9]), np.array([-1.0]), (), **recorded)
    assert state.columns["doubt"].tolist() == [0, 1, 0.5]
    state.append(np.array([9]), np.array([-1.0]), ())
    assert state.columns == {"doubt": None, "level": None}
    state.reset_response()
    assert state.columns == {}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"doubt": [0.5]}, "1 doubt for 2 response tokens"),
        ({"doubt": [0.5, 2]}, "doubt: a value above 1"),
        ({"doubt": [0.5, float("nan")]}, "doubt: a value that is not finite"),
        ({"doubt": "ab"}, "could not convert"),
        ({"doubt": [[0.5], [0.5]]}, "doubt has shape"),
        ({"doubt": {"a": [0, 0]}}, "doubt"),
        ({"level": 1.5}, "1.5 does not fit into int32"),
        ({"level": 2**40}, "does not fit into int32"),
        ({"level": [1, 1]}, "level: expected one number"),
        ({"level": "high"}, "level"),
        ({"doubts": [0.5, 0.5]}, "'doubts'"),
    ],
)
def test_what_is_no_value_of_a_column_is_refused_by_name(
    page: Any, columns: dict[str, Any], said: str
) -> None:
    with pytest.raises(JudgeError, match=said):
        take_columns("mine", [rollout(0, 2)], [check_answer("mine", {"score": 1, **columns})])
    with pytest.raises((ValueError, TypeError), match=said):
        rollout(0, 2, **columns)
    state = rollout(0, 2)
    state.columns = columns  # as an agent loop may
    with pytest.raises(WireError, match=said):
        group_bytes.encode_checked(RolloutGroup("math-0000000001", "math", [state]))


def wire(name: str, values: Any, dtype: str) -> bytes:
    states = [rollout(0, 2), rollout(1, 1)]
    raw = msgpack.unpackb(group_bytes.encode(RolloutGroup("math-0000000001", "math", states)))
    column = np.array(values, dtype)
    raw["columns"][name] = [len(raw["data"]), *column.shape]
    raw["data"] += column.tobytes() + bytes(-column.nbytes % 8)
    data: bytes = msgpack.packb(raw)
    return data


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "values", "dtype", "said"),
    [
        ("doubts", [0, 0, 0], "<f4", "unknown column 'doubts'"),
        ("os:system", [0, 0, 0], "<f4", "unknown column 'os:system'"),
        ("doubt/a", [0, 0, 0], "<f4", "unknown column 'doubt/a'"),
        ("doubt", [0, 0], "<f4", r"shape \[2\], expected \[3\]"),
        ("doubt", [[0], [0], [0]], "<f4", "2 dimensions, expected 1"),
        ("doubt", [0, 0, 2], "<f4", "doubt: a value above 1"),
        ("doubt", [0, NAN, 0], "<f4", "doubt: no value for some tokens"),
        ("doubt", [0, np.inf, 0], "<f4", "doubt: an infinite value"),
        ("doubt", [NAN] * 3, "<f4", "doubt: no rollout has a value"),
        ("level", [3], "<i4", r"shape \[1\], expected \[2\]"),
        ("level", [-1, -1], "<i4", "level: no rollout has a value"),
    ],
)
def test_hostile_bytes_of_a_column_are_a_wire_error(
    page: Any, name: str, values: Any, dtype: str, said: str
) -> None:
    with pytest.raises(WireError, match=said):
        group_bytes.decode(wire(name, values, dtype))


def test_a_process_without_the_package_says_what_is_missing(
    page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = wire("doubt", [0.5, 0.5, NAN], "<f4")
    assert group_bytes.decode(data).states[1].columns == {}
    monkeypatch.undo()
    forget()
    with pytest.raises(WireError, match="unknown column 'doubt'") as caught:
        group_bytes.decode(data)
    assert "install the package" in caught.value.hint


@pytest.mark.parametrize(
    ("code", "points", "said"),
    [
        ("A = 1", "doubt = doubt:A", "no Column with the name 'doubt'"),
        ("from rolloutmq import Column\nA = Column('a')", "doubt = doubt:A", "name 'doubt'"),
        ("from rolloutmq import Column\nA = Column('values')", "values = doubt:A", "rolloutmq's"),
        ("from rolloutmq import Column\nA = Column('a', '<i4')", "a = doubt:A", "no value for"),
    ],
)
def test_a_package_that_attaches_no_column_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, points: str, said: str
) -> None:
    attach(tmp_path, monkeypatch, code, points)
    try:
        with pytest.raises(ConfigError, match=said):
            attached_columns()
    finally:
        monkeypatch.undo()
        forget()


def test_a_wide_column_is_padded_to_the_widest_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from rolloutmq import Column\n"
        "WIDE = Column('wide', '<i4', 1, named=True, absent=-1, pad=-2, resets=False)"
    )
    attach(tmp_path, monkeypatch, code, "wide = doubt:WIDE")
    try:
        assert isinstance(attached_columns()["wide"], Column)
        states = [
            rollout(0, 2, wide={"a": [[1, 2], [3, 4]]}),
            rollout(0, 1, wide={"a": [[5]]}),
            rollout(0, 1),
        ]
        groups = [
            group_bytes.decode(group_bytes.encode(RolloutGroup("math-0000000001", "math", [state])))
            for state in states
        ]
        (batch,) = Packer(64).pack_pad_dispatch(BatchTable.of(groups))
        wide = batch.optional["wide/a"].tolist()
        assert sorted(wide) == [[-1, -1], [1, 2], [3, 4], [5, -2]]
        grown = groups[0].states[0]
        grown.append(np.array([9]), np.array([-1.0]), ())
        assert grown.columns["wide"]["a"].tolist() == [[1, 2], [3, 4], [0, 0]]
    finally:
        monkeypatch.undo()
        forget()
