"""A run on a cluster of three masters: where its keys are, and what a slot that moves costs (I13)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from redis.crc import key_slot

from buffer.errors import ConfigError, PayloadMissing, StoreError
from buffer.redis.keys import Keys
from buffer.redis.server.check import check_all, require_all_safe
from buffer.redis.server.embedded import valkey_binary
from buffer.redis.store import Store
from buffer.run.run import Run
from tests.buffer.keyspace import payload_keys
from tests.buffer.scene import Scene
from tests.cluster import Cluster, Node, free_ports, start_cluster
from tests.servers import SAFE, find_redis, raw_cluster
from tests.waits import until


@pytest.fixture(scope="module", params=["valkey", "redis"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """One whose slots a test may move."""
    binary = str(valkey_binary()) if request.param == "valkey" else find_redis()
    with start_cluster(binary, tmp_path_factory.mktemp(request.param), *SAFE) as started:
        yield started


@pytest.fixture
def raw(cluster: Cluster) -> Iterator[Any]:
    with raw_cluster(cluster.url) as client:
        yield client


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    store = Store(cluster.url, deadline_s=20.0)
    yield store
    store.close()


def live(scene: Scene, step: int) -> None:
    scene.ready(step - 1, lineage="l1")
    scene.take(step)
    scene.run.ledger.commit(scene.trainer, step, step)
    scene.run.janitor.sweep()


def test_runs_lie_on_several_nodes_and_all_are_found(
    cluster: Cluster, store: Store, raw: Any
) -> None:
    names = [f"spread-{i}" for i in range(6)]
    assert len({cluster.master_of(Keys(name).meta).port for name in names}) > 1
    for name in names:
        Scene(store, raw, name)
    assert set(names) <= set(Run.names(store))
    assert {Run.open(store, name).name for name in names} == set(names)


def test_any_node_that_answers_is_enough(cluster: Cluster, raw: Any, run_name: str) -> None:
    (nobody,) = free_ports(1)
    store = Store(
        f"redis://127.0.0.1:{nobody},127.0.0.1:{cluster.nodes[2].port}/0", deadline_s=20.0
    )
    scene = Scene(store, raw, run_name)
    scene.open_trainer()
    live(scene, 1)
    scene.check()
    store.close()


def test_every_master_is_checked(cluster: Cluster, store: Store) -> None:
    assert require_all_safe(store.servers) == []
    assert [found.level for found in check_all(store.servers)] == ["ok"] * 9
    cluster.nodes[1].ask("CONFIG SET", "maxmemory-policy", "allkeys-lru")
    try:
        (bad,) = [found for found in check_all(store.servers) if found.level == "error"]
        assert f":{cluster.nodes[1].port}/0: maxmemory-policy allkeys-lru" in bad.what
        with pytest.raises(StoreError, match="allkeys-lru"):
            require_all_safe(store.servers)
    finally:
        cluster.nodes[1].ask("CONFIG SET", "maxmemory-policy", "noeviction")


def test_a_run_goes_on_while_its_slot_moves(
    cluster: Cluster, store: Store, raw: Any, run_name: str
) -> None:
    scene = Scene(store, raw, run_name)
    scene.open_trainer()
    scene.ready(*range(1, 30))
    source = cluster.master_of(scene.keys.meta)
    target = next(node for node in cluster.nodes if node is not source)
    slot = key_slot(scene.keys.meta.encode())

    def met() -> bool:
        return scene.run.store.retries > 0

    moving = threading.Thread(target=move_slot, args=(cluster, source, target, slot, met))
    moving.start()
    steps = count(1)
    while moving.is_alive():
        live(scene, next(steps))
    moving.join()
    live(scene, next(steps))
    assert cluster.master_of(scene.keys.meta) is target
    move_slot(cluster, target, source, slot, lambda: True)
    live(scene, next(steps))
    assert (
        store.servers.client(scene.keys.meta).connection_pool.connection_kwargs["port"]
        == source.port
    )
    scene.check()


def move_slot(
    cluster: Cluster, source: Node, target: Node, slot: int, met: Callable[[], bool]
) -> None:
    target.ask("CLUSTER SETSLOT", slot, "IMPORTING", cluster.id_of(source))
    source.ask("CLUSTER SETSLOT", slot, "MIGRATING", cluster.id_of(target))
    while keys := source.ask("CLUSTER GETKEYSINSLOT", slot, 3):
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
    until(met, "somebody to meet a slot on the move")
    for node in (target, source, *cluster.nodes):
        node.ask("CLUSTER SETSLOT", slot, "NODE", cluster.id_of(target))


def test_an_address_of_the_url_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match="no URL of a Redis server"):
        Store("redis://127.0.0.1:1,127.0.0.1:port/0")


def test_a_run_lies_on_one_node_and_its_payloads_are_all_freed(
    cluster: Cluster, store: Store, raw: Any, run_name: str
) -> None:
    scene = Scene(store, raw, run_name)
    scene.open_trainer()
    scene.ready(*[0] * 20)
    assert {raw.ttl(key) for key in payload_keys(raw, run_name)} == {-1}
    mine = [len(node.ask("KEYS", f"rmq:{{{run_name}}}:*")) for node in cluster.nodes]
    assert sorted(map(bool, mine)) == [False, False, True]
    entries = scene.take(1, math=20).entries
    assert [group.gid for group in scene.run.buffer.load(scene.take(1))] == [
        entry.gid for entry in entries
    ]
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.run.janitor.sweep()
    assert payload_keys(raw, run_name) == []
    scene.check()


def test_payload_that_was_lost_with_its_node_is_missed_by_who_reads_it(
    store: Store, raw: Any, run_name: str
) -> None:
    scene = Scene(store, raw, run_name)
    scene.open_trainer()
    lost, _ = scene.ready(0, 0)
    raw.delete(scene.keys.payload(lost, scene.record(lost)["payload"]))
    manifest = scene.take(1, math=1)
    with pytest.raises(PayloadMissing, match=lost):
        scene.run.buffer.load(manifest)
    again = scene.run.ledger.quarantine(scene.trainer, 1, manifest.entries[0], "gone")
    assert len(scene.run.buffer.load(again)) == 1
    scene.check()
