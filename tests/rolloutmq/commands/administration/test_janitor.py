"""`rolloutmq janitor` as a process: two at once, one killed, everybody else dead, the server away."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from buffer.limits import RunLimits
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from tests.buffer.scene import LIMITS, Scene
from tests.rolloutmq.conftest import ROOT, in_process
from tests.waits import DEADLINE_S, until

LEASE_MS = 600

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(server: EmbeddedServer) -> Iterator[Start]:
    """`rolloutmq janitor ARGS…` as a process that ends with the test."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(*args: str, at: EmbeddedServer = server) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "rolloutmq", "janitor", *args, "--redis-url", at.url]
        begun.append(
            subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def dead_run(store: Store) -> Scene:
    """A run in which everybody fell silent with 40 groups in hand."""
    return deserted(store)


def deserted(store: Store) -> Scene:
    limits = LIMITS.model_copy(
        update={"lease_ms": LEASE_MS, "heartbeat_ms": 100, "worker_timeout_ms": 2 * LEASE_MS}
    )
    scene = Scene(store, store.client, "demo", RunLimits(**limits.model_dump()))
    scene.open_trainer()
    scene.enqueue(60)
    scene.claim(40)
    return scene


def fill_with_garbage(scene: Scene, payloads: int) -> None:
    pipe = scene.raw.pipeline(transaction=False)
    for number in range(payloads):
        gid = f"math-{number:010d}"
        pipe.set(scene.keys.payload(gid, "old"), b"x" * 100)
        pipe.sadd(scene.keys.garbage, f"{gid} old 1")
    pipe.execute()


def test_groups_of_a_dead_run_wait_again(dead_run: Scene, start: Start) -> None:
    janitor = start("--run", "demo", "--every", "10", "--json")
    until(
        lambda: (
            len(dead_run.stream("resume")) == 40 and not dead_run.raw.zcard(dead_run.keys.workers)
        )
    )
    janitor.send_signal(signal.SIGTERM)
    out, err = janitor.communicate(timeout=DEADLINE_S)
    assert janitor.returncode == 0, err
    lines = [orjson.loads(line) for line in out.splitlines()]
    assert (sum(line["reaped"] for line in lines), sum(line["gone_workers"] for line in lines)) == (
        40,
        1,
    )
    dead_run.check()


def test_two_janitors_at_once_and_one_killed_in_the_middle(dead_run: Scene, start: Start) -> None:
    fill_with_garbage(dead_run, 20_000)
    first = start("--every", "0.001")
    _ = start("--every", "0.001")
    until(lambda: dead_run.raw.scard(dead_run.keys.garbage) < 20_000)
    first.kill()
    until(
        lambda: (
            not dead_run.raw.scard(dead_run.keys.garbage) and len(dead_run.stream("resume")) == 40
        )
    )
    assert not list(dead_run.raw.scan_iter(f"{dead_run.keys.prefix}payload:*:old", count=10_000))
    assert dead_run.counters()["leases_lost"] == "40"
    dead_run.check()


def test_janitor_goes_on_when_the_server_is_back(tmp_path: Path, start: Start) -> None:
    with EmbeddedServer(tmp_path / "s") as server:
        store = Store(server.url)
        scene = deserted(store)
        fill_with_garbage(scene, 1)
        janitor = start("--every", "0.01", at=server)
        until(lambda: not scene.garbage())
        server.kill()
        server.start()
        until(lambda: store.retrying("stream", lambda: len(scene.stream("resume"))) == 40)
        assert janitor.poll() is None
        scene.check()
        store.close()


def test_janitor_once_waits_for_what_an_outage_spared_and_leaves(
    dead_run: Scene, server: EmbeddedServer
) -> None:
    dead_run.raw.hset(dead_run.keys.clock, "seen_ms", 1)
    done = in_process("janitor", "--run", "demo", "--once", "--redis-url", server.url)
    assert done.returncode == 0, done.stderr
    assert "40 groups revoked from silent workers" in done.stdout
    assert len(dead_run.stream("resume")) == 40
