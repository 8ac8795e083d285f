"""A whole run on a cluster of three nodes, five steps, until all of it is freed (I1, I6)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from buffer.ledger.account import FsckReport
from tests.pipeline.test_disaggregated import ROOT, SHARE, consumer_of, play, take
from tests.pipeline.yard import TASK, Yard
from tests.servers import Server

STEPS = 5


@pytest.mark.parametrize("make_yard", ["cluster"], indirect=True)
def test_a_cluster_serves_a_whole_run(
    make_yard: Callable[..., Yard], server_of: Callable[[str], Server], tmp_path: Path
) -> None:
    dataset = tmp_path / "problems.jsonl"
    server = server_of("cluster")
    dataset.write_bytes(
        b"\n".join(orjson.dumps({"question": f"{n:04d}", "answer": n}) for n in range(50))
    )
    yard = make_yard(stale_threshold=2)
    consumer = consumer_of(yard)
    trained = list[str]()
    nodes_with_bytes = set[str]()

    def trainer() -> None:
        for step in range(1, STEPS + 1):
            batch = take(consumer, step)
            assert [len(group.states) for group in batch.groups] == [2] * SHARE
            trained.extend(batch.manifest.gids)
            nodes_with_bytes.update(nodes_of(yard, batch.manifest.gids))
            consumer.commit(step, keep=step)
            yard.publish(step)

    command = [
        sys.executable,
        "-m",
        "tests.pipeline.produce",
        server.url,
        yard.run.name,
        str(dataset),
        str(SHARE),
    ]
    producer = subprocess.Popen(command, cwd=ROOT)
    try:
        play(yard, trainer)
    finally:
        consumer.close()
        producer.kill()
        producer.wait()
    assert len(set(trained)) == len(trained) == STEPS * SHARE
    assert len(nodes_with_bytes) > 1
    audit = account(yard)
    assert (audit.tasks[0].archived, yard.run.ledger.steps()) == (
        STEPS * SHARE,
        (STEPS, STEPS, STEPS),
    )
    while yard.run.payloads.collect():
        pass
    assert not [gid for gid in trained if yard.run.record(gid)]
    assert nodes_of(yard, trained) == set()


def account(yard: Yard) -> FsckReport:
    audit = yard.run.account.fsck()
    assert audit.clean, (audit.faults, audit.lost, audit.doubled)
    assert audit.tasks[0].task == TASK
    return audit


def nodes_of(yard: Yard, gids: list[str]) -> set[str]:
    """Return the masters that hold payloads of some groups."""
    found = set()
    for url, client in yard.store.servers.masters():
        keys = [
            key.decode()
            for key in client.scan_iter(f"rmq:{{{yard.run.name}:*}}:payload:*", count=1000)
        ]
        if [key for key in keys if any(f":{gid}}}" in key for gid in gids)]:
            found.add(url)
    return found
