"""In a cluster, a result counts once the replicas of the nodes that hold its bytes have them (I6)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import StoreUnavailable
from buffer.limits import RunLimits
from buffer.redis.payloads import pin_listed
from buffer.redis.server.embedded import valkey_binary
from buffer.redis.store import Store
from tests.buffer.scene import LIMITS, Scene
from tests.cluster import MASTERS, Cluster, Node, start_cluster
from tests.servers import SAFE, raw_cluster

SAFELY = RunLimits(**{**LIMITS.model_dump(), "wait_replicas": 1})
TOO_FEW = "only 0 of 1 replicas have it"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with start_cluster(str(valkey_binary()), tmp_path, *SAFE) as started:
        yield started


@pytest.fixture
def raw(cluster: Cluster) -> Iterator[Any]:
    with raw_cluster(cluster.url) as client:
        yield client


@contextmanager
def frozen(scene: Scene, node: Node) -> Iterator[None]:
    """Keep a replica from answering, and shorten the time that a store waits for it."""
    node.signal(signal.SIGSTOP)
    scene.run.store.deadline_s = 0.1
    yield
    node.signal(signal.SIGCONT)
    scene.run.store.deadline_s = 60.0


@pytest.mark.slow
def test_bytes_on_another_node_are_waited_for(
    cluster: Cluster, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = {master.port: cluster.add_replica(master) for master in cluster.nodes[:MASTERS]}
    store = Store(cluster.url, deadline_s=60.0)
    scene = Scene(store, raw, "demo", SAFELY)
    index = cluster.master_of(scene.keys.meta)
    scene.enqueue(9)
    jobs = scene.claim(9)
    job = next(
        job
        for job in jobs
        if cluster.master_of(scene.keys.payload(job.gid, job.token)) is not index
    )
    replica = replicas[cluster.master_of(scene.keys.payload(job.gid, job.token)).port]

    monkeypatch.setattr("buffer.redis.scripts.WAIT_MS", 300)
    with frozen(scene, replica):
        # the second one repeats a write that was made already, and that no replica has
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=TOO_FEW):
                scene.submit(job)
        assert scene.record(job.gid)["stage"] == "running"

    monkeypatch.setattr("buffer.redis.scripts.WAIT_MS", 5000)
    with monkeypatch.context() as dying:
        dying.setattr("buffer.groups.submit.pin_listed", lambda *_: 0)
        scene.submit(job)
    assert scene.record(job.gid)["stage"] == "pool"
    listed = raw.smembers(scene.keys.unpinned)
    assert listed

    monkeypatch.setattr("buffer.redis.scripts.WAIT_MS", 300)
    with frozen(scene, replica):
        with pytest.raises(StoreUnavailable, match=TOO_FEW):
            pin_listed(scene.run.store, scene.keys)
        # what is not known to be pinned stays listed
        assert raw.smembers(scene.keys.unpinned) == listed
    pin_listed(scene.run.store, scene.keys)
    assert raw.scard(scene.keys.unpinned) == 0
    scene.check()
    store.close()
