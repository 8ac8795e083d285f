"""The connection: what is retried, what is not, and what an acknowledged write survives (I6, I13)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from buffer.errors import ConfigError, RunDamaged, ScriptError, StoreError, StoreUnavailable
from buffer.ids import new_nonce
from buffer.redis.retry import Backoff, LogOnce, OutageClock, OutageLog, is_transient
from buffer.redis.scripts import ScriptCall, library
from buffer.redis.store import Store
from buffer.redis.url import open_client
from buffer.run.run import Run
from tests.buffer.cutting_proxy import CuttingProxy
from tests.buffer.scene import FIRST, LIMITS, Scene
from tests.servers import SAFE, OwnServer, Server, raw_client


@pytest.fixture(params=["valkey", "redis"])
def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OwnServer]:
    server = OwnServer(request.param, tmp_path)
    server.start(*SAFE)
    yield server
    server.kill()


def live_through(scene: Scene, disturbed: Callable[[Callable[[], Any]], Any]) -> None:
    """One group's whole life and another's half, every move made through `disturbed`."""
    assert disturbed(lambda: scene.enqueue(2)).count == 2
    disturbed(scene.worker)
    first, second = disturbed(lambda: scene.claim(2))
    disturbed(lambda: scene.beat([first, second]))
    disturbed(lambda: scene.submit(first))
    assert disturbed(lambda: scene.run.jobs.release("w0", second, "aborted")) == "pool"
    disturbed(scene.open_trainer)
    manifest = disturbed(lambda: scene.take(1))
    assert manifest.gids == [first.gid]
    disturbed(lambda: scene.run.buffer.read(manifest.entries[0].payload))
    disturbed(lambda: scene.run.ledger.commit(scene.trainer, 1, 1))
    disturbed(scene.run.janitor.sweep)
    disturbed(lambda: scene.run.control.renew_role("producer", scene.producer, closing=True))
    scene.check()
    expected = {
        "enqueued": "2", "consumed": "1", "archived": "1", "produced_samples": "2", "arrivals": "2",
    }  # fmt: skip
    assert {name: scene.counters()[name] for name in expected} == expected


@pytest.mark.parametrize("server", ["valkey", "redis"], indirect=True)
def test_a_call_that_waits_while_its_store_is_closed_ends_and_opens_no_connection(
    server: Server,
) -> None:
    store = Store(server.url, name=new_nonce())
    with ThreadPoolExecutor(1) as thread, raw_client(server.url) as raw:
        waiting = thread.submit(store.wait, f"rmq:{{{store.name}}}:bell", 5.0)

        def connections() -> list[str]:
            return [each["cmd"] for each in raw.client_list() if each["name"] == store.name]

        while "blpop" not in connections():
            time.sleep(0.01)
        store.close()
        with pytest.raises(StoreUnavailable):
            waiting.result(60)
        while connections():  # the server notices the end of the first one
            time.sleep(0.01)


def test_every_move_is_made_once_when_connections_are_killed_before_it(scene: Scene) -> None:
    def killed(move: Callable[[], Any]) -> Any:
        for url, _ in scene.store.servers.masters():
            with open_client(url, name="killer") as raw:
                for client in raw.client_list():
                    if client["name"].startswith("rolloutmq"):
                        raw.client_kill_filter(_id=client["id"])
        return move()

    live_through(scene, killed)


@pytest.mark.without(
    "cluster", "memory", reason="the proxy relays one socket; broken connections are tested above"
)
def test_every_move_is_made_once_when_its_reply_is_lost(
    server: Server, redis_client: redis.Redis, run_name: str, tmp_path: Path
) -> None:
    proxy = CuttingProxy(server.url.removeprefix("unix://"), tmp_path / "s")
    store = Store(proxy.url, deadline_s=400.0)
    scene = Scene(store, redis_client, run_name)

    def unheard(move: Callable[[], Any]) -> Any:
        before = proxy.dropped
        proxy.cut()
        result = move()
        assert proxy.dropped > before
        return result

    live_through(scene, unheard)
    assert store.retries >= 12
    store.close()
    proxy.close()


def test_commands_and_scripts_are_answered_in_order_as_the_library_answers_them(
    scene: Scene,
) -> None:
    keys = scene.keys
    counts = ScriptCall("counts", keys.slots(), {}, [keys.slots(task="math")], [None])
    key = f"{keys.prefix}payload:test"
    answers = scene.store.send(
        "test",
        [("SET", key, b"x" * 10_000), counts, ("HMGET", keys.cursors, "math"), counts, ("TIME",)],
        durable=True,
    )
    seconds, _ = answers.pop()
    assert answers == [True, ["OK", 0, 0, 0, 0], [None], ["OK", 0, 0, 0, 0]]
    assert int(seconds) > 1_700_000_000
    assert scene.store.ask("test", "SMEMBERS", keys.garbage) == set()
    assert scene.store.ask("test", "HGETALL", keys.cursors) == {}
    assert scene.store.send("test", []) == []


def test_scripts_come_back_by_themselves_when_the_server_forgot_them(scene: Scene) -> None:
    scene.raw.script_flush()
    scene.enqueue(1)
    scene.raw.script_flush()
    (job,) = scene.claim()
    scene.store.waits_for_disk = False
    scene.raw.script_flush()
    scene.submit(job)
    scene.check()


@pytest.mark.without(
    "redis", "memory", reason="no WAITAOF: newer than Redis 7.0, and memory has no disk"
)
def test_durable_calls_wait_for_the_disk_where_the_server_can_say_so(
    server: Server, run_name: str
) -> None:
    store = Store(server.url, deadline_s=5.0)
    store.waits_for_disk = True
    store.client.script_flush()
    run = Run.create(store, run_name, new_nonce(), LIMITS, FIRST, "/w")
    assert Run.open(store, run_name).nonce == run.nonce
    store.close()


def test_nothing_acknowledged_is_lost_when_the_server_is_killed(mortal: OwnServer) -> None:
    store = Store(mortal.url, deadline_s=400.0)
    raw: Any = raw_client(mortal.url)
    scene = Scene(store, raw, "mortal")
    scene.open_trainer()
    manifests = []
    for step in range(1, 6):
        scene.ready(step - 1, lineage="l1")
        manifests.append(scene.take(step))
        state = scene.dump()
        mortal.kill()
        mortal.start(*SAFE)
        store.retrying("restart", store.client.ping)
        raw.close()
        assert scene.dump() == state
        assert scene.take(step) == manifests[-1]
        scene.run.ledger.commit(scene.trainer, step, max(0, step - 2))
    scene.check()
    assert [scene.run.ledger.manifest(step) for step in (4, 5)] == manifests[3:]
    store.close()
    raw.close()


def test_calls_wait_for_a_server_that_is_away_and_go_on_when_it_is_back(mortal: OwnServer) -> None:
    store = Store(mortal.url, deadline_s=400.0)
    run = Run.create(store, "mortal", new_nonce(), LIMITS, FIRST, "/w")
    mortal.kill()
    opened: list[Run] = []
    waiting = threading.Thread(target=lambda: opened.append(Run.open(store, "mortal")))
    waiting.start()
    while not store.retries:
        pass
    mortal.start(*SAFE)
    waiting.join()
    assert [found.nonce for found in opened] == [run.nonce]
    store.close()


def test_deadline_ends_the_waiting(tmp_path: Path) -> None:
    store = Store(f"unix://{tmp_path}/nobody", deadline_s=0.2)
    with pytest.raises(StoreUnavailable, match="nobody") as caught:
        store.retrying("ping", store.client.ping)
    assert "start the server" in caught.value.hint
    assert store.retries > 0
    with pytest.raises(StoreUnavailable):
        store.retrying("ping", store.client.ping, deadline_s=0.0)
    store.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = OwnServer("valkey", tmp_path_factory.mktemp("guarded"))
    server.start(*SAFE, "--requirepass", "right-secret")
    yield server.url.removeprefix("unix://")
    server.kill()


@pytest.mark.parametrize("credentials", ["", ":wrong-secret@", "nobody:wrong-secret@"])
def test_wrong_password_is_an_error_at_once_and_never_shown(guarded: str, credentials: str) -> None:
    store = Store(f"unix://{credentials}{guarded}", deadline_s=600.0)
    with pytest.raises(StoreError) as caught:
        Run.create(store, "demo", new_nonce(), LIMITS, FIRST, "/w")
    assert store.retries == 0
    assert "secret" not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:top-secret@127.0.0.1:1/0",
        "redis://me:top-secret@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password=top-secret",
        "unix:///nowhere/socket?password=top-secret",
    ],
)
def test_password_never_appears_when_nobody_answers(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(url, deadline_s=0.05)
    with pytest.raises(StoreUnavailable) as caught:
        store.retrying("ping", store.client.ping)
    shown = f"{caught.value} {caught.value.hint} {caught.value.__cause__} {caplog.text}"
    assert "secret" not in shown
    store.close()


@pytest.mark.parametrize(
    "url",
    ["redis://:top/secret@host:6379", "http://:top-secret@host", "redis://h:port", "nonsense"],
)
def test_bad_url_is_a_config_error_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_client(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_errors_that_waiting_cannot_help_are_not_retried(store: Store, run_name: str) -> None:
    store = store.at(run_name)
    store.client.set(run_name, "text")
    with pytest.raises(RunDamaged, match="push: a key of the run is of another type"):
        store.retrying("push", lambda: store.client.lpush(run_name, "x"))
    assert store.retries == 0
    with pytest.raises(ScriptError):
        store.call("beat", {}, {})


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (redis.ConnectionError("gone"), True), (redis.TimeoutError("slow"), True),
        (redis.BusyLoadingError("loading"), True), (redis.OutOfMemoryError("full"), True),
        (redis.ReadOnlyError("replica"), True), (redis.ResponseError("MISCONF disk"), True),
        (redis.ResponseError("BUSY script"), True), (redis.AuthenticationError("no"), False),
        (redis.exceptions.NoPermissionError("no"), False),
        (redis.ResponseError("ERR unknown"), False), (redis.DataError("bug"), False),
    ],
)  # fmt: skip
def test_only_transient_errors_are_retried(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


def test_arguments_against_the_header_are_refused_by_name(scene: Scene) -> None:
    before = scene.dump()
    with pytest.raises(
        ScriptError, match=r"^reap: limit must be 1\.\.200, got 201; nothing was changed$"
    ):
        scene.run.jobs.reap(201)
    keys = (scene.keys.control, scene.keys.events, scene.keys.wake_up("producer"))
    with pytest.raises(
        redis.ResponseError, match=r"^RMQ_ARG beat: number of ARGV must be \d+, got 1$"
    ):
        scene.raw.eval(library()["beat"].source, len(keys), *keys, "trainer")
    assert scene.dump() == before


def test_key_of_a_wrong_type_is_damage_and_fsck_names_it(scene: Scene) -> None:
    scene.enqueue(1)
    scene.worker()
    scene.raw.lpush(scene.keys.leases, "x")
    before = scene.dump()
    with pytest.raises(RunDamaged, match=r"^claim: a key of the run") as caught:
        scene.claim()
    assert "fsck" in caught.value.hint
    assert scene.dump() == before
    faults = scene.run.account.fsck().faults
    assert f"{scene.keys.leases} is a list, and not a zset" in faults


@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_jitter_is_the_random_share_of_a_pause(jitter: float) -> None:
    pauses = [Backoff(1.0, 4.0, jitter).pause_s(1) for _ in range(500)]
    assert 2.0 * (1.0 - jitter) <= min(pauses) < max(pauses) <= 2.0
    assert max(pauses) - min(pauses) > jitter


def test_reason_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    state = LogOnce(logging.getLogger("test"), "claiming nothing")
    for reason in ("", "paused", "paused", "full", "", "", "full"):
        state.report(reason)
    assert caplog.messages == [f"claiming nothing: {word}" for word in ("paused", "full", "full")]


def test_outages_are_logged_once_each_and_end_by_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outages = OutageLog()
    for operation in ("claim", "submit"):
        outages.failed(operation, "refused", is_full=False)
    assert caplog.messages == ["server unreachable or full: refused, during claim; waiting for it"]
    outages.worked("heartbeat")
    outages.failed("enqueue", "full", is_full=True)
    # a full server answers most calls: only the refused operation shows that it accepts work again
    outages.worked("heartbeat")
    assert caplog.messages[1:] == [
        "server back",
        "server unreachable or full: full, during enqueue; waiting for it",
    ]
    outages.worked("enqueue")
    outages.worked("enqueue")
    assert caplog.messages[3:] == ["server back"]


def test_outage_restarts_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("buffer.redis.retry.time.monotonic", lambda: now)
    clock = OutageClock()
    now = 102.0
    assert (clock.poll(), clock.had_outage) == (2.0, False)
    now = 110.0
    assert (clock.poll(), clock.had_outage) == (0.0, True)
    now = 111.0
    assert (clock.poll(), clock.had_outage) == (1.0, True)
