"""A reply may be lost, so every script may run twice: the second run must change nothing (I13)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from buffer import Mode, PolicyVersion, RunLimits, Status, Store
from buffer.scripts import Arg, library
from tests.buffer.keyspace import changed, dump
from tests.buffer.scene import LIMITS, Scene
from tests.servers import Server

MUTATING = sorted(name for name, script in library().items() if "no-writes" not in script.source.split("\n")[0])


class EchoStore(Store):
    """Sends one script twice, as if its first reply had been lost, and compares the key space."""

    def __init__(self, url: str, raw: redis.Redis, run: str, script: str) -> None:
        super().__init__(url, deadline_s=5.0)
        self.raw, self.run, self.script = raw, run, script
        self.differences: list[dict[str, Any]] = []
        self.calls = 0

    def call(
        self,
        script: str,
        keys: Mapping[str, str],
        args: Mapping[str, Arg],
        tail_keys: Sequence[str] = (),
        tail_args: Sequence[Arg] = (),
        *,
        durable: bool = False,
    ) -> list[Any]:
        reply = super().call(script, keys, args, tail_keys, tail_args, durable=durable)
        if script == self.script:
            before = dump(self.raw, self.run)
            again = super().call(script, keys, args, tail_keys, tail_args, durable=durable)
            # who left has left: UNKNOWN is as good as OK then
            assert again[0] == reply[0] or script == "deregister"
            self.differences.append(changed(before, dump(self.raw, self.run)))
            self.calls += 1
        return reply


@pytest.fixture
def echo(
    server: Server, redis_client: redis.Redis, run_name: str, request: pytest.FixtureRequest
) -> Iterator[EchoStore]:
    store = EchoStore(server.url, redis_client, run_name, request.param)
    yield store
    store.close()


def tell_a_whole_story(scene: Scene, folder: Path) -> None:
    """Every script, in every branch that changes something."""
    run = scene.run
    scene.open_producer()
    scene.open_trainer()
    scene.enqueue(9, samples=[2, 2, 0, 2, 2, 2, 2, 2, 2])
    ready, partial, filtered, back, aborted, failed, buried, _ = scene.claim(8)
    scene.beat([ready, partial])
    scene.submit(ready)
    scene.submit(partial, status=Status.ABORTED)
    scene.submit(filtered, filtered=True)
    run.jobs.release("w0", back, "handback")
    run.jobs.release("w0", aborted, "aborted")
    run.jobs.release("w0", failed, "failed")
    run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    scene.claim(9, worker="w1")
    scene.expire_leases(buried.gid, partial.gid)
    run.jobs.reap()
    run.fleet.fence("w1")
    run.fleet.fence("w0")
    scene.nonces.clear()
    survivors = scene.claim(9)
    run.jobs.release("w0", survivors.pop(), "failed")
    for job in survivors:
        scene.submit(job)
    put_right_by_hand(scene)
    scene.take(2, strict=False)
    run.ledger.commit(scene.trainer, 2, 1)
    run.buffer.refresh("math")
    run.jobs.reissue(scene.producer, "math", "expired", 1000)
    run.ledger.set_target(scene.trainer, "quiz", 3)
    run.control.set_mode("trainer", Mode.ABORT, nonce=scene.trainer)
    run.control.publish_weights(scene.trainer, PolicyVersion("l1", 2), "/w/2", "sum")
    run.control.set_mode("trainer", Mode.RUN, nonce=scene.trainer)
    scene.enqueue(1)
    (job, *_) = scene.claim(weights=PolicyVersion("l1", 2))
    scene.submit(job, PolicyVersion("l1", 2))
    scene.open_trainer(step=1, lineage="l2", take_over=True)
    run.fleet.deregister("w0", scene.worker())
    scene.raw.zadd(scene.keys.workers, {"w1": 1})
    run.jobs.reap()
    lines = [
        {"gid": gid, "task": "math", "response_ids": [1], "logprobs": [0.0], "reward": {"score": 1.0}} for gid in "ab"
    ]
    (folder / "f.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    run.import_groups(folder / "f.jsonl")
    run.control.beat("trainer", scene.trainer)
    run.control.beat("trainer", scene.trainer, closing=True)
    run.control.beat("producer", scene.producer, closing=True)


def put_right_by_hand(scene: Scene) -> None:
    """Batch 1, and groups that are no good."""
    scene.ready(0, 0, 0)
    scene.ready(0, task="code")
    swapped, kept, removed = scene.take(1, math=2, code=1).entries
    for entry in (swapped, removed):
        scene.run.ledger.quarantine(scene.trainer, 1, entry, "not good")
    assert scene.take(1).gids[1:] == [kept.gid]
    for gid, before in ((swapped.gid, "dead"), (removed.gid, "dead"), (scene.ready(0)[0], "completed")):
        assert scene.run.jobs.requeue(gid) == before
    assert scene.run.jobs.drop(removed.gid) == "waiting"
    (job, other) = scene.claim(2)
    assert scene.run.jobs.drop(job.gid, revoke="w0") == "running"
    scene.submit(other)
    assert scene.run.jobs.drop(other.gid) == "completed"


@pytest.mark.parametrize(
    ("echo", "tail_batch", "order"),
    [(name, -1, "staleness") for name in MUTATING if name != "reorder"]
    + [("refresh", 0, "staleness"), ("reissue", 0, "staleness")]
    + [
        (name, 0, "length_fair")
        for name in ("submit", "import", "take_batch", "quarantine", "refresh", "requeue", "reorder")
    ],
    indirect=["echo"],
)
def test_script_changes_nothing_when_it_runs_again(
    echo: EchoStore, redis_client: redis.Redis, run_name: str, tail_batch: int, order: str, tmp_path: Path
) -> None:
    limits = RunLimits(**{**LIMITS.model_dump(), "max_tries": 2, "tail_batch_trigger_size": tail_batch, "order": order})
    scene = Scene(echo, redis_client, run_name, limits)
    tell_a_whole_story(scene, tmp_path)
    assert echo.calls > 0
    assert echo.differences == [{}] * echo.calls
    scene.check()
