from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.own_copy import own_copy
from buffer.wire.rollout import MediaRef, RolloutState, Status, ToolCall, VersionSpan
from buffer.wire.sampling import SampleParams, StructuredOutput


def rollout(index: int) -> RolloutState:
    structured = StructuredOutput(json_schema={"type": "object", "enum": [1]})
    return RolloutState(
        index=index,
        messages=[{"role": "user", "content": [{"text": "?"}]}],
        tools=[{"function": {"parameters": {"a": [1]}}}],
        tool_choice={"function": {"name": "f"}},
        multimodal=[MediaRef(kind="image", uri="images/a.png", grid_thw=[1, 2, 3])],
        ground_truth={"answer": [1, {"b": [2]}]},
        extra={"tests": [["a"]], "row": {"n": 1}},
        sample_params=SampleParams(stops=["x"], structured=structured, seed=index),
        tool_calls=[ToolCall(id="1", name="f", arguments={"a": [1]})],
        prompt_ids=np.arange(4),
        response_ids=np.arange(3),
        logprobs=np.full(3, -0.5),
        response_mask=np.array([1, 0, 1]),
        values=np.ones(3),
        teacher_logprobs={"t": np.zeros(3)},
        routed_experts=np.zeros((6, 1, 2)),
        spans=[VersionSpan(0, 3, 0, "a")],
        reward={"score": 1.0},
        finish_reason="stop",
        status=Status.COMPLETED,
    )


def reachable(value: Any, found: dict[int, Any]) -> dict[int, Any]:
    """Return everything that can be changed in `value`, by id."""
    if isinstance(value, np.ndarray):
        if value.flags.writeable:
            found[id(value)] = value
        return found
    if isinstance(value, dict | list | set):
        found[id(value)] = value
    parts: Any = value.values() if isinstance(value, dict) else ()
    if isinstance(value, list | tuple | set):
        parts = value
    elif hasattr(value, "__struct_fields__"):
        parts = [getattr(value, name) for name in value.__struct_fields__]
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        parts = vars(value).values()
    for part in parts:
        reachable(part, found)
    return found


def memory_of(found: dict[int, Any]) -> list[np.ndarray[Any, Any]]:
    return [value for value in found.values() if isinstance(value, np.ndarray)]


@pytest.mark.parametrize("is_received", [True, False])
def test_rollouts_and_their_table_share_nothing_that_can_be_changed(is_received: bool) -> None:
    given = [rollout(index) for index in range(3)]
    group = RolloutGroup("math-0000000001", "math", given)
    before = group_bytes.encode(group)
    if is_received:
        group = group_bytes.decode(memoryview(bytearray(before)))
    parties = [*(given if not is_received else []), *group.states]
    owned = [reachable(state, {}) for state in [*parties, group.multimodal]]
    owned.append(reachable([group.head.shared, group.head.own, group.columns], {}))
    seen: dict[int, Any] = {}
    for found in owned:
        assert not seen.keys() & found.keys()
        arrays = memory_of(seen)
        assert not any(np.shares_memory(a, b) for a in memory_of(found) for b in arrays)
        seen |= found
    for found in owned[:-1]:
        for value in found.values():
            if isinstance(value, np.ndarray):
                value[...] = 7
            elif isinstance(value, dict):
                value["ruined"] = 1
            else:
                value.clear()
    assert group_bytes.encode(group) == before
    again = group_bytes.decode(before).states
    assert [state.model_dump_json(include={"extra", "ground_truth"}) for state in again] == [
        rollout(index).model_dump_json(include={"extra", "ground_truth"}) for index in range(3)
    ]


def test_rollouts_of_a_group_have_the_mask_that_was_set_last() -> None:
    group = RolloutGroup("math-0000000001", "math", [rollout(index) for index in range(2)])
    assert [state.response_mask.tolist() for state in group.states] == [[1, 0, 1]] * 2  # type: ignore[union-attr]
    group.mask = np.array([0, 0, 1, 1, 0, 0], "u1")
    masks = [state.response_mask.tolist() for state in group.states]  # type: ignore[union-attr]
    assert masks == [[0, 0, 1], [1, 0, 0]]


@dataclass(frozen=True)
class Plain:
    items: list[Any] = field(default_factory=list)


class OfUser(Struct, kw_only=True):
    names: list[str]


def test_a_copy_is_equal_and_of_the_same_types_at_any_depth() -> None:
    opaque = object()
    value: dict[str, Any] = {
        "plain": [1, 1.5, True, None, "text", b"bytes"],
        "kinds": [(1, [2]), {3}, bytearray(b"4"), Plain([[5]]), VersionSpan(0, 1, 2, "a")],
        "dicts": [OrderedDict(a=[6]), defaultdict(list, b=[7])],
        "models": [rollout(0).sample_params, rollout(0).tool_calls, OfUser(names=["x"])],
        "opaque": [opaque],
    }
    before = copy.deepcopy({key: item for key, item in value.items() if key != "opaque"})
    made = own_copy(value)
    assert made == value
    assert [type(item) for item in made["kinds"]] == [type(item) for item in value["kinds"]]
    assert [type(item) for item in made["dicts"]] == [OrderedDict, defaultdict]
    assert made["opaque"][0] is opaque
    made["kinds"][0][1].append(0)
    made["kinds"][1].add(0)
    made["kinds"][2].append(0)
    made["kinds"][3].items[0].append(0)
    made["dicts"][0]["a"].append(0)
    made["dicts"][1]["b"].append(0)
    made["models"][0].stops.append("y")
    made["models"][0].structured.json_schema["enum"].append(0)
    made["models"][1][0].arguments["a"].append(0)
    made["models"][2].names.append("y")
    assert {key: item for key, item in value.items() if key != "opaque"} == before
