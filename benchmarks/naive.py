"""Small versions of the naive ways, with one Redis entry per group, to repeat the comparison.

`pickle stream` is PipelineRL's: `pipelinerl/streams.py` pickles the group as Python objects with
lists of numbers, adds it to a stream, and reads entry after entry. The others store one value:
msgpack with lists of numbers, and msgpack with raw arrays, decoded without any check.
"""

from __future__ import annotations

# Only here, to measure what others do; a pickle from a stranger runs the stranger's code.
import pickle
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from benchmarks.figure import Way
from benchmarks.server import BenchServer
from buffer.wire.group import RolloutGroup

STREAM = "naive:stream"


def as_lists(group: RolloutGroup) -> list[dict[str, Any]]:
    """Return a group as most trainers hold it: a dict with lists of numbers per rollout."""
    return [
        {
            "gid": group.gid,
            "input_ids": [*group.prompt_ids.tolist(), *state.response_ids.tolist()],
            "logprobs": state.logprobs.tolist(),
            "mask": state.response_mask.tolist() if state.response_mask is not None else None,
            "reward": state.reward,
            "text": state.response,
        }
        for state in group.states
    ]


def as_arrays(group: RolloutGroup) -> dict[str, Any]:
    """Return a group with its columns as raw bytes."""
    names = ("prompt_ids", "lengths", "response_ids", "logprobs", "mask")
    return {
        "gid": group.gid,
        "texts": group.head.responses,
        **{name: getattr(group, name).tobytes() for name in names},
    }


def from_lists(rollouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arrays, as packing needs them."""
    names = ("input_ids", "logprobs", "mask")
    return [rollout | {name: np.array(rollout[name]) for name in names} for rollout in rollouts]


def from_arrays(document: dict[str, Any]) -> dict[str, Any]:
    """Arrays over the received bytes."""
    ints = {
        name: np.frombuffer(document[name], "<i4")
        for name in ("prompt_ids", "lengths", "response_ids")
    }
    return document | ints | {"logprobs": np.frombuffer(document["logprobs"], "<f4")}


def add_to_stream(client: Any, index: int, rollouts: list[dict[str, Any]]) -> None:
    """Write one group, as a producer of PipelineRL does."""
    fields = {"index": index, "data": pickle.dumps(rollouts)}
    client.xadd(STREAM, fields, maxlen=1_000_000, approximate=True)


def read_stream(client: Any, last: bytes) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the entry after `last`: its id and its group."""
    [[_, [[last, fields]]]] = client.xread({STREAM: last}, count=1)
    return last, from_lists(pickle.loads(fields[b"data"]))


def writers(server: BenchServer, groups: list[RolloutGroup]) -> dict[str, Way]:
    """Each way to write; the objects that a producer would have are made beforehand."""
    raw = server.raw
    lists = [as_lists(group) for group in groups]

    def stream(_: Any) -> None:
        for index, rollouts in enumerate(lists):
            add_to_stream(raw, index, rollouts)

    def store(values: list[Any], pack: Callable[[Any], bytes]) -> None:
        for place, value in enumerate(values):
            raw.set(f"naive:{place}", pack(value))

    ways: dict[str, Callable[[Any], object]] = {
        "naive: pickle stream": stream,
        "naive: msgpack lists": lambda _: store(lists, msgpack.packb),
        "naive: msgpack arrays": lambda _: store(
            groups, lambda group: msgpack.packb(as_arrays(group))
        ),
    }
    return {name: Way(way, clean=server.clear) for name, way in ways.items()}


def readers(server: BenchServer, groups: list[RolloutGroup]) -> dict[str, Way]:
    """Each way to read what `writers` wrote, to arrays."""
    raw = server.raw
    for place, group in enumerate(groups):
        lists = as_lists(group)
        add_to_stream(raw, place, lists)
        raw.set(f"naive:lists:{place}", msgpack.packb(lists))
        raw.set(f"naive:arrays:{place}", msgpack.packb(as_arrays(group)))

    def stream(_: Any) -> list[Any]:
        found, last = [], b"0"
        for _index in range(len(groups)):
            last, rollouts = read_stream(raw, last)
            found.append(rollouts)
        return found

    def load(kind: str, unpack: Callable[[Any], Any]) -> list[Any]:
        return [
            unpack(msgpack.unpackb(raw.get(f"naive:{kind}:{place}")))
            for place in range(len(groups))
        ]

    ways: dict[str, Callable[[Any], object]] = {
        "naive: pickle stream": stream,
        "naive: msgpack lists": lambda _: load("lists", from_lists),
        "naive: msgpack arrays": lambda _: load("arrays", from_arrays),
    }
    return {name: Way(way) for name, way in ways.items()}
