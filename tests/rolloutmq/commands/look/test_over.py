from __future__ import annotations

import os
import re
import shutil
import signal
import stat
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
from consumer.handle import dead_letter_file
from consumer.handle.dead_letter_file import kept_dead_letters, read_dead_letters
from rolloutmq.run_owner import own
from rolloutmq.views.run_view import read_run_view
from tests.rolloutmq.conftest import ROOT, in_process, json_of
from tests.rolloutmq.populate import Scene, populate, write_samples
from tests.waits import until


@pytest.fixture
def over(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """The server of a run that was killed with a lease, roles and a dead letter; it is stopped."""
    server = EmbeddedServer(tmp_path / "runs" / "demo" / "server")
    with server, closing(Store(server.url, deadline_s=400.0)) as store:
        scene = populate(store)
        write_samples(scene, server.folder.parent)
        with kept_dead_letters(scene.run, server.folder.parent):
            pass
    (server.folder.parent / "run.json").write_bytes(orjson.dumps({"nonce": scene.run.nonce}))
    yield server
    server.kill()


def contents(server: EmbeddedServer) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in server.folder.glob("appendonlydir/*")}


@pytest.mark.parametrize(
    "words",
    [
        "status", "dead", "ls", "show math-0000000003", "batch", "logs events -n 3",
        "workers", "fsck", "doctor", "status --follow --count 1", "metrics",
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


@pytest.mark.slow
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


def test_a_run_whose_data_are_lost_is_read_from_its_folder(over: EmbeddedServer) -> None:
    shutil.rmtree(over.folder)
    cwd = over.folder.parents[2]
    told = json_of(in_process("status", "--json", cwd=cwd))
    assert (told["run"], told["phase"]) == ("demo", "no server")
    assert (told["folder"]["steps"], told["folder"]["dead letters"]) == ("1", "1")
    letter = dead_letter(json_of(in_process("dead", "--json", cwd=cwd)))
    assert letter == ("math-0000000005", "ValueError: the judge said no", "w0")
    assert len(json_of(in_process("batch", "1", "--json", cwd=cwd))["groups"]) == 2
    shown = json_of(in_process("show", "math-0000000001", "--json", cwd=cwd))
    assert shown["members"][0]["response"] == "It was worst."
    assert in_process("report", cwd=cwd).returncode == 0
    with own(over.folder.parent, "demo", ["demo.toml"], 2):  # it has not lost its server for ever
        assert in_process("status", cwd=cwd).returncode == 3
    for words in ("ls", "fsck", "show math-0000000003"):
        done = in_process(*words.split(), cwd=cwd)
        assert (done.returncode, done.stdout) == (3, "")


def dead_letter(letters: list[dict[str, str]]) -> tuple[str, str, str]:
    (letter,) = letters
    return letter["gid"], letter["reason"], letter["worker"]


@pytest.mark.parametrize("fault", ["no data", "damaged", "unreachable"])
def test_the_folder_of_a_named_run_is_read_without_its_server(
    over: EmbeddedServer, fault: str
) -> None:
    data = over.folder / "appendonlydir"
    if fault == "no data":
        shutil.rmtree(data)
    elif fault == "damaged":
        next(data.glob("*.manifest")).write_text("nonsense\n")
    else:
        shutil.rmtree(over.folder)
    url = "redis://127.0.0.1:1/0" if fault == "unreachable" else ""
    words = ("dead", "--json", "--run-dir", str(over.folder.parent))
    assert dead_letter(json_of(in_process(*words, REDIS_URL=url)))[0] == "math-0000000005"
    assert not over.is_running
    assert in_process("dead", "--redis-url", "redis://127.0.0.1:1/0").returncode == 3


def test_kept_dead_letters_follow_the_server_and_survive_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_file, "EVERY_S", 0.05)
    file = tmp_path / dead_letter_file.FILE
    with EmbeddedServer(tmp_path / "server") as server:
        scene = populate(Store(server.url, deadline_s=0.1))
        with kept_dead_letters(scene.run, tmp_path):
            until(lambda: kept(tmp_path) == [("math-0000000005", "ValueError: the judge said no")])
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            scene.run.jobs.requeue("math-0000000005")
            until(lambda: file.read_bytes() == b"")
            (job,) = scene.claim("w1", 1)
            scene.run.jobs.release("w1", job, "failed", "another")
            until(lambda: kept(tmp_path) == [(job.gid, "another")])
            server.kill()
        scene.run.store.close()
    assert kept(tmp_path) == [(job.gid, "another")]
    whole = file.read_bytes()
    for damage in (b"", b"\xff", b"[]", b'{"gid": 7}', whole[:-9], whole.replace(b"-0000", b"")):
        file.write_bytes(damage + b"\n" + whole)
        assert kept(tmp_path) == [(job.gid, "another")]


def kept(folder: Path) -> list[tuple[str, str]]:
    return [(letter.gid, letter.reason) for letter in read_dead_letters(folder)]
