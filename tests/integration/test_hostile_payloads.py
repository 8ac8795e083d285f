"""A worker that hands in garbage: the trainer puts it aside, says why and whose it was, and goes on with the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgpack
import numpy as np
import pytest
import zstandard

from buffer import RolloutGroup, RunLimits, Status, Store, TaskLimits, wire
from buffer.config.sections import check_name
from buffer.errors import RolloutMQError
from buffer.hand_in import HandIn
from buffer.job import Job, Result
from buffer.keys import Keys
from consumer.rollout_consumer import RolloutConsumer
from tests.buffer.scene import FIRST, Scene, extend, rollout
from tests.consumer.conftest import die
from tests.servers import Server, start_server

LIMITS = RunLimits(stale_threshold=10_000, role_timeout_ms=60_000, tasks={"math": TaskLimits()})


def changed(data: bytes, **fields: object) -> bytes:
    document = msgpack.unpackb(data, strict_map_key=False)
    return bytes(msgpack.packb(document | fields))


def with_column(data: bytes, name: str, values: np.ndarray) -> bytes:
    columns = msgpack.unpackb(data)["columns"]
    columns[name] = {"dtype": columns[name]["dtype"], "data": values.tobytes()}
    return changed(data, columns=columns)


def without(data: bytes, name: str) -> bytes:
    document = msgpack.unpackb(data)
    del document[name]
    return bytes(msgpack.packb(document))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def doubled_key(data: bytes) -> bytes:
    count, rest = data[0], data[1:]
    return bytes([count + 1]) + rest + bytes(msgpack.packb("schema")) + bytes(msgpack.packb(99))


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "one byte": lambda data: data[:1],
    "nothing": lambda data: b"",
    "trailing bytes": lambda data: data + b"\x00",
    "another schema": lambda data: changed(data, schema=99),
    "missing field": lambda data: without(data, "columns"),
    "wrong lengths": lambda data: with_column(data, "lengths", np.array([2, 70], "<i4")),
    "nan": lambda data: with_column(data, "logprobs", np.full(8, np.nan, "<f4")),
    "another group": lambda data: changed(data, gid="math-0000999999"),
    "deep": lambda data: nested(100_000),
    "extension type": lambda data: changed(data, members=msgpack.ExtType(5, b"x")),
    "bad utf-8": lambda data: data.replace(b"math", b"\xff\xfeth"),
    "keys that are no text": lambda data: bytes(msgpack.packb({1: 2, b"x": 3})),
    "the same key twice": doubled_key,
    "zstd bomb": lambda data: zstandard.ZstdCompressor().compress(bytes(300 * 2**20)),
    "pickle": lambda data: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    "random": lambda data: np.random.default_rng(3).bytes(2000),
    "html": lambda data: b"<!doctype html>",
}


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server("valkey", tmp_path_factory.mktemp("hostile")) as server:
        yield server


@pytest.fixture
def scene(own_server: Server, run_name: str) -> Iterator[Scene]:
    store = Store(own_server.url, deadline_s=10.0)
    with own_server.connect() as raw:
        yield Scene(store, raw, run_name, LIMITS)
    store.close()


def hand_in(scene: Scene, job: Job, data: bytes, group: RolloutGroup, worker: str) -> None:
    """What a worker can do that writes its own bytes, and says of them what it should say of a good group."""
    run = scene.run
    ref, commands = run.payloads.commands(job.gid, job.token, data)
    scene.store.write("payload write", commands)
    hands = HandIn(scene.store, run.keys, run.limits, run.payloads, None)
    scene.store.call("submit", *hands.call(worker, Result(job, group, 4), ref))


def test_the_trainer_goes_on_whatever_a_worker_hands_in(scene: Scene) -> None:
    scene.enqueue(2 * len(SPOILED))
    for spoil in SPOILED.values():
        (bad,), (good,) = scene.claim(1, worker="garbage"), scene.claim(1, worker="good")
        group = extend(scene.run.buffer.read(bad.payload), Status.COMPLETED, FIRST)
        hand_in(scene, bad, spoil(wire.encode(group)), group, "garbage")
        scene.submit(good, worker="good")
    consumer = RolloutConsumer(scene.run)
    consumer.open()
    try:
        for step in range(1, len(SPOILED) // 2 + 1):
            batch = consumer.take_batch(step, {"math": 2}, deadline_s=60.0)
            assert all(group.scores.tolist() == [1.0, 1.0] for group in batch.groups)
            assert consumer.take_batch(step, {"math": 2}).manifest == batch.manifest
            consumer.commit(step, keep=step)
    finally:
        die(consumer)
    letters = {letter.gid: letter for letter in scene.run.dead_letters.newest()}
    assert len(letters) == len(SPOILED)
    assert all(letter.worker == "garbage" and letter.reason for letter in letters.values())
    workers = {worker["id"]: worker for worker in scene.run.fleet.workers()}
    assert int(workers["garbage"]["quarantined"]) == len(SPOILED)
    assert "quarantined" not in workers["good"]
    scene.check()


@pytest.mark.parametrize("samples", [1, 1024])
@pytest.mark.parametrize("tokens", [0, 3])
def test_groups_of_one_and_of_many_samples_with_and_without_tokens(scene: Scene, samples: int, tokens: int) -> None:
    scene.open_trainer()
    scene.enqueue(1, samples=[samples])
    (job,) = scene.claim(1)
    scene.submit(job, FIRST if tokens else None)
    group = scene.run.buffer.load(scene.take(1))[0]
    assert len(group) == samples
    assert group.lengths.sum() == (2 * samples if tokens else 0)
    scene.check()


def test_a_group_of_64_megabytes_comes_and_goes_whole(scene: Scene) -> None:
    scene.open_trainer()
    scene.enqueue(1)
    (job,) = scene.claim(1)
    group = extend(scene.run.buffer.read(job.payload), Status.COMPLETED, FIRST)
    group.shared["extra"] = {"ballast": "x" * (64 * 2**20)}
    scene.run.buffer.submit("w0", job, group, 4)
    (back,) = scene.run.buffer.load(scene.take(1))
    assert back.shared["extra"] == group.shared["extra"]
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.run.janitor.sweep()
    assert scene.run.memory.count().held == 0
    assert not list(scene.raw.scan_iter(f"{scene.keys.prefix}payload:*"))


STRANGE = ("", " ", "a b", "a:b", "{a}", "a{b}c", "ä", "a\n", "a\0b", "../a", "x" * 65, "x" * 10_240)


@pytest.mark.parametrize("name", STRANGE, ids=range(len(STRANGE)))
def test_strange_names_are_refused_everywhere(scene: Scene, name: str) -> None:
    results = [[rollout(Status.COMPLETED, FIRST)]]
    with pytest.raises(RolloutMQError):
        Keys(name)
    with pytest.raises(ValueError, match="expected letters"):
        check_name(name)
    with pytest.raises(RolloutMQError):
        scene.run.fleet.register(name, "nonce", {})
    with pytest.raises((RolloutMQError, KeyError)):
        scene.run.buffer.put(name, results)
    with pytest.raises((RolloutMQError, KeyError)):
        scene.run.jobs.drop(f"{name}-0000000001")
    scene.check()
