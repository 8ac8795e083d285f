"""A primary dies and a replica replaces it: no answered write is lost, and clients continue.

Invariants: I6, I13.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from buffer.errors import ConfigError, Fenced, StoreUnavailable
from buffer.limits import RunLimits
from buffer.manifest import Manifest
from buffer.redis.server.embedded import valkey_binary
from buffer.redis.store import Store
from buffer.redis.url import open_client
from tests.buffer.scene import LIMITS, Scene
from tests.cluster import MASTERS, Cluster, Node, start_cluster
from tests.sentinels import Watched, start_watched
from tests.servers import SAFE, find_redis, raw_cluster
from tests.waits import until

WAIT_ONE = RunLimits(**{**LIMITS.model_dump(), "wait_replicas": 1})
WAIT_TWO = RunLimits(**{**LIMITS.model_dump(), "wait_replicas": 2})
PATIENT_S = 300.0


# a kind each, for the time it takes: Redis 7.0 is slow to follow a new primary (15 s) when
# Sentinels name it


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with start_watched(str(valkey_binary()), tmp_path, *SAFE) as started:
        yield started


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    options = (*SAFE, "--cluster-replica-no-failover", "yes")
    with start_cluster(find_redis(), tmp_path, *options) as started:
        yield started


def patient(url: str) -> redis.Redis:
    """Return a client that asks the Sentinels again while they name a primary that is gone."""
    client = open_client(url)
    client.set_retry(Retry(ConstantBackoff(0.1), int(PATIENT_S / 0.1)))
    return client


def work(scene: Scene, steps: range) -> list[Manifest]:
    """Batches 1 to n, all but the last two committed; one more group runs, one is ready."""
    manifests = []
    for step in steps:
        scene.ready(step - 1, lineage="l1")
        manifests.append(scene.take(step))
        scene.run.ledger.commit(scene.trainer, step, max(0, step - 2))
    return manifests


def go_on(scene: Scene, manifests: list[Manifest]) -> None:
    """Everything that was answered before is there; the run goes on; the account adds up."""
    last = len(manifests)
    for manifest in manifests[-2:]:
        assert scene.take(manifest.step) == manifest
        assert scene.run.buffer.read(manifest.entries[0].payload).gid == manifest.gids[0]
    work(scene, range(last + 1, last + 4))
    scene.run.janitor.sweep()
    scene.check()


def test_sentinels_name_another_primary_and_nothing_answered_is_lost(watched: Watched) -> None:
    store = Store(watched.url, deadline_s=PATIENT_S)
    with patient(watched.url) as raw:
        # either replica may be the one that is chosen; one is left to wait for
        scene = Scene(store, raw, "demo", WAIT_TWO)
        scene.open_trainer()
        manifests = work(scene, range(1, 6))
        scene.run.store.wait_replicas = 1
        watched.primary.kill()
        watched.promote()
        go_on(scene, manifests)
        assert scene.run.store.retries > 0
    store.close()
    until(lambda: watched.connections() == 0, "connections to the Sentinel to be closed")


@pytest.mark.slow
def test_a_cluster_promotes_a_replica_and_nothing_answered_is_lost(cluster: Cluster) -> None:
    store = Store(cluster.url, deadline_s=PATIENT_S)
    master = cluster.master_of("rmq:{demo}:meta")
    replica = cluster.add_replica(master)
    for other in [node for node in cluster.nodes[:MASTERS] if node is not master]:
        cluster.add_replica(other)  # payloads lie there, too, and wait for a replica
    with raw_cluster(cluster.url) as raw:
        scene = Scene(store, raw, "demo", WAIT_ONE)
        scene.open_trainer()
        manifests = work(scene, range(1, 6))
    master.kill()
    replica.ask("CLUSTER FAILOVER", "TAKEOVER")
    # it comes back as the replica of its replica; before that, nothing durable is answered
    back = threading.Thread(target=come_back, args=(cluster, master, replica))
    back.start()
    # another client: the library's would leave connections to nodes of the old map open
    with raw_cluster(replica.url) as scene.raw:
        go_on(scene, manifests)
    back.join()
    assert cluster.master_of(scene.keys.meta) is replica
    assert scene.run.store.retries > 0
    store.close()


def come_back(cluster: Cluster, dead: Node, promoted: Node) -> None:
    until(lambda: cluster.ports_of("rmq:{demo}:meta") == {promoted.port}, "the promotion")
    dead.start()


def test_a_durable_call_is_not_answered_while_no_replica_has_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.redis.scripts.WAIT_MS", 300)
    store = Store(watched.url, deadline_s=PATIENT_S)
    raw: Any = patient(watched.url)
    scene = Scene(store, raw, "demo", WAIT_ONE)
    scene.open_trainer()
    scene.ready(0, 0)
    for replica in watched.replicas:
        replica.signal(signal.SIGSTOP)
    scene.run.store.deadline_s = 0.1
    # the second one repeats what the first one wrote, maybe on another connection
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="only 0 of 1 replicas have it"):
            scene.take(1)
        raw.connection_pool.disconnect()
        store.client.connection_pool.disconnect()
    for replica in watched.replicas:
        replica.signal(signal.SIGCONT)
    scene.run.store.deadline_s = PATIENT_S
    assert len(scene.take(1).gids) == 1
    scene.check()
    raw.close()
    store.close()


def test_roles_are_fenced_by_nonces_when_a_failover_lost_who_held_them(watched: Watched) -> None:
    """Without `wait_replicas`: an epoch comes twice, a nonce never (I7)."""
    store = Store(watched.url, deadline_s=PATIENT_S)
    raw = patient(watched.url)
    scene = Scene(store, raw, "demo", WAIT_TWO)
    first = scene.open_trainer()
    scene.ready(*[0] * 4)
    scene.take(1)
    scene.run.store.wait_replicas = 0
    for replica in watched.replicas:
        replica.signal(signal.SIGSTOP)
    # what is sent already is read once they go on
    watched.primary.ask("CLIENT", "KILL", "TYPE", "replica")
    second = scene.open_trainer(step=1, lineage="l2", take_over=True)
    lost = scene.take(2)
    epoch = scene.run.control.state().epoch
    watched.primary.kill()
    for replica in watched.replicas:
        replica.signal(signal.SIGCONT)
    watched.promote()
    # whose opening was lost changes nothing, and does not go on with a batch that nobody else has
    with pytest.raises(Fenced):
        scene.run.ledger.take(second, 2, {"math": 1})
    assert scene.run.control.holder("trainer").nonce == first
    scene.open_trainer(step=1, lineage="l3", take_over=True)
    assert scene.run.control.state().epoch <= epoch
    with pytest.raises(Fenced):
        scene.run.ledger.take(first, 2, {"math": 1})
    assert scene.take(2).gids == lost.gids
    scene.check()
    raw.close()
    store.close()


@pytest.mark.parametrize(
    "url", ["redis+sentinel://:top-secret@h:1", "redis+sentinel://:top-secret@h:port/queue"]
)
def test_bad_url_of_sentinels_is_a_config_error_without_the_password(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"redis\+sentinel://host:port,host:port/service"
    ) as caught:
        Store(url)
    assert "secret" not in str(caught.value)


def test_logins_of_server_and_sentinels_are_told_apart() -> None:
    url = "rediss+sentinel://me:a%40b@h1:1,h2/queue/3?sentinel_password=c&ssl_ca_certs=/ca.pem"
    client: Any = open_client(url)
    pool = client.connection_pool
    login = {
        name: pool.connection_kwargs[name]
        for name in ("username", "password", "db", "ssl_ca_certs")
    }
    assert login == {"username": "me", "password": "a@b", "db": 3, "ssl_ca_certs": "/ca.pem"}
    watchers = [
        sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels
    ]
    assert [(w["host"], w["port"], w["password"], w.get("ssl_ca_certs")) for w in watchers] == [
        ("h1", 1, "c", "/ca.pem"),
        ("h2", 26379, "c", "/ca.pem"),
    ]
