"""Every mistake gets one clear message on stderr, its documented exit code, and no traceback."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run import Run
from tests.rolloutmq.conftest import Command, in_process
from tests.rolloutmq.populate import Scene, populate


def check(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


def test_no_server_at_all_says_how_to_name_one(tmp_path: Path) -> None:
    check(in_process("status", cwd=tmp_path), 3, "no --redis-url", "REDIS_URL", "--run-dir")


def test_folder_without_a_server(tmp_path: Path) -> None:
    check(in_process("status", "--run-dir", str(tmp_path)), 3, "has no embedded server")


def test_stopped_server_says_that_its_data_is_safe(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "runs" / "old"):
        pass
    check(
        in_process("status", cwd=tmp_path),
        3,
        "runs/old is not running",
        "rolloutmq server",
        "rolloutmq run",
    )


def test_server_command_without_a_run(tmp_path: Path) -> None:
    check(in_process("server", cwd=tmp_path), 2, "no folder under ./runs")


def test_nothing_listens_at_the_url() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    check(
        in_process("status", "--redis-url", f"redis://127.0.0.1:{port}/0"),
        3,
        "no server listens there",
    )


@pytest.mark.parametrize("name", [("web", "--port"), ("metrics", "--serve", "--port")])
def test_a_port_that_is_taken(scene: Scene, command: Command, name: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check(command(*name, str(port)), 2, f"cannot listen on 127.0.0.1:{port}", "another port")


def test_a_host_of_another_machine(scene: Scene, command: Command) -> None:
    check(command("web", "--host", "192.0.2.1"), 2, "cannot listen on 192.0.2.1:9465")


def test_url_of_no_server() -> None:
    check(
        in_process("status", "--redis-url", "http://localhost"),
        2,
        "no URL of a Redis server",
        "redis://",
    )


def test_wrong_password_is_told_without_showing_it(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    with server:
        with server.connect() as client:
            client.config_set("requirepass", "right")
        url = f"unix://:wr0ng@{server.socket_path}"
        done = in_process("status", "--redis-url", url)
    check(done, 3, "refuses the user or password")
    assert "wr0ng" not in done.stderr


def test_unknown_run_names_those_there_are(scene: Scene, command: Command) -> None:
    check(command("workers", "--run", "nope"), 5, "no run 'nope'", "demo")


def test_run_name_that_is_no_name(scene: Scene, command: Command) -> None:
    check(command("status", "--run", "a:b"), 2, "run name")


def test_no_run_on_the_server(store: Store, command: Command) -> None:
    check(command("ls"), 5, "no run on", "rolloutmq run")


def test_several_runs_are_listed(scene: Scene, store: Store, command: Command) -> None:
    populate(store, "other")
    check(command("ls"), 2, "demo, other", "--run NAME")


@pytest.mark.parametrize("name", ["status", "ls", "workers", "doctor"])
def test_run_option_chooses_among_several(
    scene: Scene, store: Store, command: Command, name: str
) -> None:
    populate(store, "other")
    assert command(name, "--run", "other").returncode == 0


@pytest.mark.parametrize(
    ("gid", "words"),
    [
        ("math", "is not a group id"),
        ("chess-0000000001", "no task 'chess'"),
        ("math-0000000099", "has not been started yet"),
        ("../../etc/passwd", "is not a group id"),
    ],
)
def test_bad_gid(scene: Scene, command: Command, gid: str, words: str) -> None:
    check(command("show", gid), 2, words)


def test_member_that_the_group_has_not(scene: Scene, command: Command) -> None:
    check(command("show", "math-0000000002", "--member", "7"), 2, "no member 7")


@pytest.mark.parametrize(
    ("option", "value"), [("--task", "chess"), ("--status", "done"), ("--stage", "lost")]
)
def test_unknown_filter_names_the_known_ones(
    scene: Scene, command: Command, option: str, value: str
) -> None:
    check(command("ls", option, value), 2, f"'{value}'", "one of")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--where", "{status: completed}"], ["--where is not valid JSON", "quote"]),
        (["--where", "[]"], ["a query is a map"]),
        (["--where", '{"colour": 1}'], ["no field 'colour'", "staleness"]),
        (["--where", '{"status": "done"}'], ["'done'", "completed"]),
        (["--where", '{"tries": {"$like": 1}}'], ["no operator '$like'", "$between"]),
        (["--where", '{"tries": {"$between": [2, 1]}}'], ["lowest, highest"]),
        (["--order", "colour"], ["no field 'colour'"]),
    ],
)
def test_question_that_cannot_be_asked(
    scene: Scene, command: Command, options: list[str], words: list[str]
) -> None:
    check(command("ls", *options), 2, *words)


def test_unknown_worker_names_the_known_ones(scene: Scene, command: Command) -> None:
    check(command("fence", "w7", "--yes"), 2, "no worker 'w7'", "w0, w1")


def test_run_of_another_schema(scene: Scene, store: Store, command: Command) -> None:
    store.control.hset(scene.run.keys.meta, "schema", "999")
    check(command("status"), 1, "schema 999")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = in_process("status", cwd=tmp_path, ROLLOUTMQ_DEBUG="1")
    assert done.returncode == 3
    assert "Traceback" in done.stderr


def test_bad_input_leaves_the_run_as_it_was(scene: Scene, store: Store, command: Command) -> None:
    before = scene.run.account.totals()
    command("fence", "w0")
    command("show", "math-0000000099")
    assert Run.open(store, "demo").account.totals() == before
