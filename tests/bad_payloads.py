"""The kinds of bad payload, once for all entrances: what is handed in where a good document was
expected.

Each entrance has a form of its own (msgpack, a line of JSON, a reward, a control message); KINDS
names what is done to each. What is no fault in some form is none of the values there: a reward may
be a bare number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np
import zstandard

Spoil = Callable[[bytes], bytes]

DEPTH = 100_000

BYTES: Mapping[str, Spoil] = {
    "nothing": lambda good: b"",
    "one byte": lambda good: good[:1],
    "truncated": lambda good: good[: len(good) // 2],
    "trailing bytes": lambda good: good + b"\x00",
    "random": lambda good: np.random.default_rng(3).bytes(2000),
    "bad utf-8": lambda good: good.replace(b"e", b"\xff\xfe"),
    "pickle": lambda good: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    "html": lambda good: b"<!doctype html>",
    "zstd bomb": lambda good: zstandard.ZstdCompressor().compress(bytes(300 * 2**20)),
    "not an object": lambda good: b"7",
}
"""The same in every form."""

SHAPES = (
    *(
        "deep", "giant length", "another schema", "missing field", "unknown field", "wrong type",
        "wrong lengths",
    ),
    *("nan", "infinite", "negative id", "another group", "same key twice", "odd keys"),
)  # fmt: skip
"""What is wrong with the document; each form has its own."""

KINDS = (*BYTES, *SHAPES)


def spoil_msgpack(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(good: bytes) -> bytes:
        document = msgpack.unpackb(good, strict_map_key=False)
        change(document)
        return bytes(msgpack.packb(document))

    return spoil


def column(name: str, values: Any) -> Callable[[dict[str, Any]], object]:
    data = np.asarray(values)
    return lambda document: document["columns"].update(
        {name: {"dtype": data.dtype.str, "data": data.tobytes()}}
    )


def doubled_key(good: bytes) -> bytes:
    return (
        bytes([good[0] + 1]) + good[1:] + bytes(msgpack.packb("schema")) + bytes(msgpack.packb(99))
    )


GROUP: Mapping[str, Spoil] = {
    **BYTES,
    "deep": lambda good: b"\x91" * DEPTH + b"\xc0",
    "giant length": lambda good: b"\x86\xa6schema\xdd\xff\xff\xff\xff",
    "another schema": spoil_msgpack(lambda d: d.update(schema=99)),
    "missing field": spoil_msgpack(lambda d: d.pop("columns")),
    "unknown field": spoil_msgpack(lambda d: d.update(surprise=1)),
    "wrong type": spoil_msgpack(lambda d: d.update(members={"index": "one"})),
    "wrong lengths": spoil_msgpack(column("lengths", np.array([2, 70], "<i4"))),
    "nan": spoil_msgpack(column("logprobs", np.full(4, np.nan, "<f4"))),
    "infinite": spoil_msgpack(column("logprobs", np.full(4, np.inf, "<f4"))),
    "negative id": spoil_msgpack(column("prompt_ids", np.full(3, -1, "<i4"))),
    "another group": spoil_msgpack(lambda d: d.update(gid="math-0000999999")),
    "same key twice": doubled_key,
    "odd keys": lambda good: bytes(msgpack.packb({1: 2, b"x": msgpack.ExtType(5, b"x")})),
}
"""A payload: what a worker hands in, and the prompt that it is given."""


def spoil_json(**fields: Any) -> Spoil:
    return lambda good: json.dumps(json.loads(good) | fields).encode()


LINE: Mapping[str, Spoil] = {
    **BYTES,
    "deep": lambda good: b"[" * DEPTH,
    "giant length": spoil_json(samples=2**70),
    "another schema": spoil_json(schema=99),
    "missing field": lambda good: json.dumps(
        {k: v for k, v in json.loads(good).items() if k != "reward"}
    ).encode(),
    "unknown field": spoil_json(surprise=1),
    "wrong type": spoil_json(response_ids={"0": 1}),
    "wrong lengths": spoil_json(logprobs=[-1.0] * 70),
    "nan": spoil_json(logprobs=[float("nan")] * 2),
    "infinite": spoil_json(reward={"score": float("inf")}),
    "negative id": spoil_json(response_ids=[-1, 2]),
    "another group": spoil_json(task="no such task"),
    "same key twice": lambda good: good[:-1] + b', "gid": "x", "reward": 3}',
    "odd keys": spoil_json(**{"\u0000": 1, "": 2}),
}
"""A line of a file that is imported."""

REWARD: Mapping[str, Spoil] = {
    **BYTES,
    "not an object": lambda good: b'"7"',
    "deep": lambda good: b"[" * DEPTH + b"]" * DEPTH,
    "giant length": lambda good: b'{"score": 1' + b"0" * 5000 + b"}",
    "another schema": spoil_json(schema="99"),
    "missing field": lambda good: b'{"points": 1.0}',
    "unknown field": spoil_json(surprise=[1]),
    "wrong type": spoil_json(score="one"),
    "wrong lengths": lambda good: b"[1.0, 2.0]",
    "nan": spoil_json(score=float("nan")),
    "infinite": spoil_json(score=float("inf")),
    "negative id": spoil_json(score=None),
    "another group": spoil_json(score={"math-0000999999": 1.0}),
    "same key twice": lambda good: b'{"score": 1.0, "score": "x"}',
    "odd keys": spoil_json(**{"": "x"}),
}
"""What a judge answers."""


def spoil_field(place: int, value: bytes) -> Spoil:
    def spoil(good: bytes) -> bytes:
        fields = good.split(b"\0")
        return b"\0".join([*fields[:place], value, *fields[place + 1 :]])

    return spoil


CONTROL: Mapping[str, Spoil] = {
    **BYTES,
    "trailing bytes": lambda good: good + b"\0\0",
    "truncated": lambda good: b"\0".join(good.split(b"\0")[:4]),
    "bad utf-8": spoil_field(4, b"\xff\xfe"),
    "deep": lambda good: good.replace(b"\0", b"\0" * DEPTH),
    "giant length": spoil_field(0, b"9" * 5000),
    "another schema": spoil_field(1, b"hibernate"),
    "missing field": spoil_field(0, b""),
    "unknown field": lambda good: good + b"\0surprise",
    "wrong type": spoil_field(0, b"two"),
    "wrong lengths": lambda good: good + good,
    "nan": spoil_field(0, b"nan"),
    "infinite": spoil_field(3, b"l0:inf"),
    "negative id": spoil_field(3, b"l0:-1"),
    "another group": spoil_field(3, b"math-0000999999"),
    "same key twice": lambda good: good + b"\0" + good,
    "odd keys": spoil_field(2, b"no such lane"),
}
"""A hint of the control channel: epoch, mode, lanes, weights, path and checksum of these."""
