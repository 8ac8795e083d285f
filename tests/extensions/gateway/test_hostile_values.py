from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from rolloutmq.extensions.gateway import guests
from tests.extensions.gateway.test_control_tokens import REQUESTS, gullible
from tests.extensions.gateway.test_gateway_endpoint import Desk, at_desk
from tests.producer_workers.recorder import Recorder
from tests.thoroughness import examples

__all__ = ["gullible"]


def nested(depth: int, *, is_map: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if is_map else [value]
    return value


HOSTILE = [
    *(nested(depth, is_map=is_map) for depth in (30, 60, 190) for is_map in (False, True)),
    # the arguments of a call are JSON in a text
    *('{"a":' * depth + "1" + "}" * depth for depth in (60, 200, 1000, 100_000)),
    *(10**30, -1, 1.5, True, None, "", [], {}, "\ud800", "\0", '{"a": 1e999}', '{"a": NaN}'),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    parts: Any = value.items() if isinstance(value, dict) else ()
    for key, part in enumerate(value) if isinstance(value, list) else parts:
        yield from places(part, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a value with `new` at a place."""
    if not path:
        return new
    made = dict(value) if isinstance(value, dict) else list(value)
    inner = made.get(path[0]) if isinstance(made, dict) else made[path[0]]
    made[path[0]] = put(inner, path[1:], new)
    return made


BODIES = {f"v1/{path}": body for path, (body, _) in REQUESTS.items()} | {
    "v1/messages/count_tokens": REQUESTS["messages"][0],
    "inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 5}},
}
FIELDS = (
    *("tool_choice", "stop_sequences", "text", "output_config", "previous_response_id"),
    *("messages", "input", "system", "instructions", "tools", "token_ids", "sampling_params"),
)
"""Fields of some request, which each gets."""


@pytest.mark.parametrize("path", BODIES)
def test_a_hostile_value_is_answered_or_refused(
    gullible: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "MOST_PER_S", 100_000)
    request = {"max_tokens": 5, "stop": ["z"], "stream": False} | BODIES[path]
    known = {*places(request), *((field,) for field in FIELDS)}
    tried = [(place, value) for place in sorted(known, key=str) for value in HOSTILE]
    tried = random.Random(0).sample(tried, min(len(tried), examples(200)))
    engine = Recorder(gullible)

    async def scene(desk: Desk) -> None:
        url = f"{desk.gateway.url.removesuffix('/v1')}/{path}"
        headers = {"Authorization": f"Bearer {desk.key}"}
        for number, (place, value) in enumerate(tried):
            body = json.dumps(put(request, place, value)).encode()
            async with desk.http.post(url, data=body, headers=headers) as reply:
                assert reply.status in (200, 400), (place, str(value)[:40], await reply.read())
            if number % 99 == 98:
                desk.session.segments = []  # a session has a limit of them

    at_desk(gullible, engine, scene, max_tokens=1_000_000)
