"""A worker that hands in garbage: the trainer puts it aside, says why and whose it was, and goes on
with the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from buffer.config.run_settings import check_name
from buffer.errors import RolloutMQError
from buffer.groups.submit import Submission
from buffer.job import Job, Result
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.keys import Keys
from buffer.redis.store import RunContext, Store
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import Status
from consumer.handle.rollout_consumer import RolloutConsumer
from tests.bad_payloads import GROUP, KINDS
from tests.buffer.scene import FIRST, Scene, extend, rollout
from tests.consumer.conftest import die
from tests.servers import Server, start_server

LIMITS = RunLimits(stale_threshold=10_000, role_timeout_ms=60_000, tasks={"math": TaskLimits()})


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server("valkey", tmp_path_factory.mktemp("hostile")) as server:
        yield server


@pytest.fixture
def scene(own_server: Server, run_name: str) -> Iterator[Scene]:
    store = Store(own_server.url, deadline_s=400.0)
    with own_server.connect() as raw:
        yield Scene(store, raw, run_name, LIMITS)
    store.close()


def hand_in(scene: Scene, job: Job, data: bytes, group: RolloutGroup, worker: str) -> None:
    """What a worker can do that writes its own bytes, and says of them what it should say of a good
    group.
    """
    run = scene.run
    ref, commands = run.payloads.commands(job.gid, job.token, [data])
    scene.store.send("payload write", commands)
    submission = Submission(RunContext(scene.store, run.keys, run.limits), run.payloads)
    unit = submission.arguments(Result(job, group, 4), ref)
    scene.store.send("submit", [submission.call(worker, job.task, [unit])])


def test_the_trainer_goes_on_whatever_a_worker_hands_in(scene: Scene) -> None:
    scene.enqueue(2 * len(KINDS) + 1)
    for kind in KINDS:
        (bad,), (good,) = scene.claim(1, worker="garbage"), scene.claim(1, worker="good")
        group = extend(scene.run.buffer.read(bad.payload), Status.COMPLETED, FIRST)
        hand_in(scene, bad, GROUP[kind](group_bytes.encode(group)), group, "garbage")
        scene.submit(good, worker="good")
    scene.submit(scene.claim(1, worker="good")[0], worker="good")
    consumer = RolloutConsumer(scene.run)
    consumer.open()
    try:
        for step in range(1, (len(KINDS) + 1) // 2 + 1):
            batch = consumer.take_batch(step, {"math": 2}, deadline_s=400.0)
            assert all(group.scores.tolist() == [1.0, 1.0] for group in batch.groups)
            assert consumer.take_batch(step, {"math": 2}).manifest == batch.manifest
            consumer.commit(step, keep=step)
    finally:
        die(consumer)
    letters = {letter.gid: letter for letter in scene.run.dead_letters.newest()}
    assert len(letters) == len(KINDS)
    assert all(letter.worker == "garbage" and letter.reason for letter in letters.values())
    workers = {worker.id: worker.quarantined for worker in scene.run.fleet.workers()}
    assert workers == {"garbage": len(KINDS), "good": 0}
    scene.check()


@pytest.mark.parametrize("samples", [1, 1024])
@pytest.mark.parametrize("tokens", [0, 3])
def test_groups_of_one_and_of_many_samples_with_and_without_tokens(
    scene: Scene, samples: int, tokens: int
) -> None:
    scene.open_trainer()
    scene.enqueue(1, samples=[samples])
    (job,) = scene.claim(1)
    scene.submit(job, FIRST if tokens else None)
    group = scene.run.buffer.load(scene.take(1))[0]
    assert len(group) == samples
    assert group.lengths.sum() == (2 * samples if tokens else 0)
    scene.check()


STRANGE = (
    "", " ", "a b", "a:b", "{a}", "a{b}c", "ä", "a\n", "a\0b", "../a", "x" * 65, "x" * 10_240,
)  # fmt: skip


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
