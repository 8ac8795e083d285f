from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer.control.roles import HeldRole
from buffer.errors import RolloutMQError, StoreUnsafe
from buffer.ids import new_nonce
from buffer.redis import eviction
from buffer.redis.server.check import check_server
from buffer.redis.store import Store
from rolloutmq.views.run_view import read_run_view
from tests.buffer.scene import Scene
from tests.servers import SAFE, raw_client, start_redis

JUNK = b"x" * 100_000


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with start_redis(tmp_path, *SAFE) as url, raw_client(url) as raw:
        store = Store(url, deadline_s=20.0)
        scene = Scene(store, raw, "evicted")
        scene.open_producer()
        scene.open_trainer()
        scene.enqueue(6)
        yield scene
        store.close()


def evict(raw: Any, policy: str = "allkeys-random") -> None:
    """Let another application fill the memory until keys are evicted."""
    raw.config_set("maxmemory-policy", policy)
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + 3 * len(JUNK))
    number = 0
    while not raw.info("stats")["evicted_keys"]:
        raw.set(f"other:{number}", JUNK, ex=1000)
        number += 1


def names_the_policy(error: RolloutMQError) -> bool:
    return "allkeys-random" in error.message and "noeviction" in error.command_hint


@pytest.mark.parametrize("role", ["trainer", "producer"])
def test_holder_of_a_role_notices_evictions_with_its_heartbeats(
    scene: Scene, role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "LOOK_S", 0.0)
    nonce = scene.trainer if role == "trainer" else scene.producer
    held = HeldRole(scene.run.control, role, nonce=nonce)
    looked = threading.Event()
    watch_evictions = scene.run.control.watch_evictions

    def look(watch: eviction.EvictionWatch) -> None:
        watch_evictions(watch)
        looked.set()

    monkeypatch.setattr(scene.run.control, "watch_evictions", look)
    held.renew_in_background(lambda: 0.05, lambda: None)
    assert held.thread
    assert looked.wait(400)
    evict(scene.raw)
    held.thread.join(400)
    with pytest.raises(StoreUnsafe) as caught:
        held.check()
    assert names_the_policy(caught.value)


def test_policy_alone_is_a_warning(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(eviction, "LOOK_S", 0.0)
    watch = eviction.EvictionWatch()
    for policy in ("noeviction", "allkeys-lru", "volatile-ttl"):
        scene.raw.config_set("maxmemory-policy", policy)
        for _ in range(3):
            scene.run.control.watch_evictions(watch)
    assert [record.getMessage().count("policy is") for record in caplog.records] == [1, 1]


def test_who_is_refused_by_an_evicted_run_is_told_why(scene: Scene) -> None:
    evict(scene.raw)
    scene.raw.delete(scene.keys.control)
    nonce = scene.trainer
    moves: list[Callable[[], object]] = [
        lambda: scene.run.ledger.take(nonce, 1, {"math": 1}),
        lambda: scene.run.ledger.commit(nonce, 0, 0),
        lambda: scene.run.control.renew_role("trainer", nonce),
        lambda: scene.run.jobs.enqueue(scene.producer, new_nonce(), "math", 6, [2], 1000),
    ]
    for move in moves:
        with pytest.raises(StoreUnsafe) as caught:
            move()
        assert names_the_policy(caught.value)


def test_views_and_checks_of_the_server_name_it(scene: Scene) -> None:
    assert not read_run_view(scene.run).faults
    evict(scene.raw, "volatile-random")
    assert not read_run_view(scene.run).faults  # it takes keys with an expiry only
    scene.raw.config_set("maxmemory-policy", "allkeys-random")
    assert any("allkeys-random" in fault for fault in read_run_view(scene.run).faults)
    scene.raw.config_set("maxmemory-policy", "noeviction")
    found = [finding for finding in check_server(scene.raw) if "evicted" in finding.what]
    assert [finding.level for finding in found] == ["warning"]
