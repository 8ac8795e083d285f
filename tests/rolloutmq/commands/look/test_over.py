"""Runs whose processes are gone: every view starts the run's own server, and changes nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from buffer.control.control import Mode
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from rolloutmq.views.run_view import read_run_view
from tests.rolloutmq.conftest import ROOT, in_process, json_of
from tests.rolloutmq.populate import Scene, populate


@pytest.fixture
def over(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """The server of a run that was killed with a lease, roles and a dead letter; it is stopped."""
    server = EmbeddedServer(tmp_path / "runs" / "demo" / "server")
    with server, closing(Store(server.url, deadline_s=400.0)) as store:
        nonce = populate(store).run.nonce
    (server.folder.parent / "run.json").write_bytes(orjson.dumps({"nonce": nonce}))
    yield server
    server.kill()


def contents(server: EmbeddedServer) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in server.folder.glob("appendonlydir/*")}


@pytest.mark.parametrize(
    "words",
    [
        "status", "dead", "ls", "show math-0000000003", "batch", "tail --from-start --count 3",
        "workers", "fsck", "doctor", "top --count 1", "metrics",
    ],
)  # fmt: skip
def test_a_view_of_a_killed_run_starts_its_server_and_changes_nothing(
    over: EmbeddedServer, words: str
) -> None:
    before = contents(over)
    done = in_process(*words.split(), cwd=over.folder.parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("runs/demo does not run: it is started") == 1
    assert not over.is_running
    assert contents(over) == before


def test_runs_starts_no_server(over: EmbeddedServer) -> None:
    (line,) = json_of(in_process("runs", "--json", cwd=over.folder.parents[2]))
    assert line["folder"] == "runs/demo"
    assert "started" not in in_process("runs", cwd=over.folder.parents[2]).stderr


def test_views_share_a_server_and_a_killed_one_leaves_it_to_the_next(over: EmbeddedServer) -> None:
    first, second = web(over), web(over)
    first.send_signal(signal.SIGTERM)
    first.communicate()
    assert first.returncode == 130
    assert over.is_running
    second.kill()
    second.communicate()
    assert over.is_running
    assert "started" not in in_process("status", cwd=over.folder.parents[2]).stderr
    assert not over.is_running


def web(over: EmbeddedServer) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "rolloutmq", "web", "--port", "0"],
        cwd=over.folder.parents[2], env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    assert re.match(r"http://127.0.0.1:\d+/", process.stdout.readline())
    return process


@pytest.mark.parametrize("phase", ["finished", "stopped"])
def test_a_run_that_is_over_is_headed_so_and_still_has_its_workers(
    scene: Scene, phase: str
) -> None:
    run = scene.run
    run.jobs.release("w0", scene.running, "failed", "its last one")
    assert read_run_view(run).phase == "run"
    for worker in ("w0", "w1"):
        assert run.fleet.deregister(worker, scene.workers[worker])
    view = read_run_view(run)
    assert [(row.id, row.state, row.done) for row in view.ended_workers] == [
        ("w1", "left", 4),
        ("w0", "left", 4),
    ]
    if phase == "finished":
        run.control.set_mode("trainer", Mode.FINISH, nonce=scene.trainer)
    run.control.renew_role("trainer", scene.trainer, closing=True)
    run.control.renew_role("producer", scene.producer, closing=True)
    view = read_run_view(run)
    assert (view.phase, view.paused_by, view.live_workers) == (phase, None, [])
    scene.join("w1")
    assert read_run_view(run).ended_workers == ()
