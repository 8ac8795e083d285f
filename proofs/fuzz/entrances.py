"""Run as a program: coverage-guided fuzz of every entrance but the decoder of groups (`make fuzz`;
that is decoder.py).

argv: those of libFuzzer, the folder of the corpus last; it is filled with tests/bad_payloads.py
first. The first byte says which entrance the rest is handed in at.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["buffer", "producer_workers"]):
    import orjson

    from buffer.control.control_line import read_hint
    from buffer.curation.rollout_line import RolloutLine, group_of
    from buffer.errors import ConfigError, JudgeError, QueryError, WireError
    from buffer.query.language import parse
    from buffer.redis.url import open_client, seeds
    from buffer.wire import group_bytes
    from buffer.wire.group import RolloutGroup
    from buffer.wire.rollout import RolloutState, Status
    from producer_workers.datasets.records import problem_of
    from producer_workers.user_code.border import check_reward

GID = "math-0000000001"


def control(data: bytes) -> None:
    if state := read_hint(data):
        assert state.epoch >= 0
        assert state.weights.version >= 0


def reward(data: bytes) -> None:
    try:
        assert all(
            math.isfinite(value) for value in check_reward("judge", orjson.loads(data)).values()
        )
    except (JudgeError, orjson.JSONDecodeError):
        return


def imported_line(data: bytes) -> None:
    """What is accepted can be written, and read again."""
    try:
        line = RolloutLine.parse(orjson.loads(data))
        group = group_of([line], GID, "math")
    except ValueError as error:
        if len(str(error)) > 2000:
            raise AssertionError("an error is read by people") from error
        return
    assert group_bytes.decode(group_bytes.encode(group)).states[0].reward == line.reward


def prompt(data: bytes) -> None:
    """A row of a data set, up to the bytes that are stored for a worker."""
    try:
        problem = problem_of(orjson.loads(data))
    except ValueError as error:
        if len(str(error)) > 2000:
            raise AssertionError("an error is read by people") from error
        return
    fields: dict[str, Any] = {"messages": problem.messages, "ground_truth": problem.ground_truth}
    try:
        states = [RolloutState(prompt_ids=[1], extra=problem.extra, tools=problem.tools, **fields)]
        back = group_bytes.decode(group_bytes.encode(RolloutGroup(GID, "math", states)))
    except (WireError, ValueError):
        return
    assert back.states[0].messages == problem.messages
    assert back.states[0].status is Status.INIT


def question(data: bytes) -> None:
    try:
        parse(orjson.loads(data))
    except (QueryError, orjson.JSONDecodeError):
        return


def url(data: bytes) -> None:
    text = data.decode(errors="replace")
    try:
        for seed in seeds(text):
            open_client(seed).close()
    except ConfigError:
        return


ENTRANCES: tuple[Callable[[bytes], None], ...] = (
    control, reward, imported_line, prompt, question, url,
)  # fmt: skip


def try_one(data: bytes) -> None:
    if data:
        ENTRANCES[data[0] % len(ENTRANCES)](data[1:])


def seeds_of_corpus() -> dict[str, bytes]:
    from tests.bad_payloads import CONTROL, LINE, REWARD

    row = {
        "gid": "a", "task": "math", "response_ids": [1], "logprobs": [-1.0],
        "reward": {"score": 1.0},
    }  # fmt: skip
    message = {"question": "1 + 1", "answer": "2", "extra": {"level": 1}, "tools": [{"name": "f"}]}
    asked = {"$or": [{"staleness": {"$gte": 2}}, {"status": {"$in": ["completed"]}}], "reward": 0.5}
    address = b"redis+sentinel://user:a-long-secret@[::1]:1,host:2/service/0?ssl_ca_certs=x&sentinel_username=y"
    good: tuple[bytes, ...] = (
        b"3\0run\0eval fresh\0l0:1\0/w\0sum",
        orjson.dumps({"score": 1.0}),
        orjson.dumps(row),
    )
    good += (orjson.dumps(message), orjson.dumps(asked), address)
    found = {f"good-{place}": bytes([place]) + data for place, data in enumerate(good)}
    for place, kinds in enumerate((CONTROL, REWARD, LINE)):
        for name, spoil in kinds.items():
            found[f"{place}-{name}"] = bytes([place]) + spoil(good[place])[:4096]
    return found


def main(arguments: list[str]) -> None:
    corpus = Path(arguments[-1])
    corpus.mkdir(parents=True, exist_ok=True)
    for name, data in seeds_of_corpus().items():
        (corpus / name.replace(" ", "-")).write_bytes(data)
    atheris.Setup([sys.argv[0], *arguments], try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
