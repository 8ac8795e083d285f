from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from buffer.redis.store import Store
from tests.rolloutmq.conftest import Command, in_process
from tests.rolloutmq.populate import Scene, populate


def check(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["status"], 3, ["no --redis-url", "REDIS_URL", "--run-dir"]),
        (["status", "--run-dir", "."], 3, ["has no embedded server"]),
        (["server"], 2, ["no folder under ./runs"]),
    ],
)
def test_a_server_that_is_not_named(
    tmp_path: Path, words: list[str], code: int, said: list[str]
) -> None:
    check(in_process(*words, cwd=tmp_path), code, *said)


@pytest.mark.parametrize("name", [("web", "--port"), ("metrics", "--serve", "--port")])
def test_a_port_that_is_taken(scene: Scene, command: Command, name: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check(command(*name, str(port)), 2, f"cannot listen on 127.0.0.1:{port}", "another port")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["web", "--host", "192.0.2.1"], 2, ["cannot listen on 192.0.2.1:9465"]),
        (["workers", "--run", "nope"], 5, ["no run 'nope'", "demo"]),
        (["status", "--run", "a:b"], 2, ["run name"]),
        (["show", "math"], 2, ["is not a group id"]),
        (["show", "chess-0000000001"], 2, ["no task 'chess'"]),
        (["show", "math-0000000099"], 2, ["has not been started yet"]),
        (["show", "../../etc/passwd"], 2, ["is not a group id"]),
        (["show", "math-0000000002", "--member", "7"], 2, ["no member 7"]),
        (["ls", "--task", "chess"], 2, ["'chess'", "one of"]),
        (["ls", "--status", "done"], 2, ["'done'", "one of"]),
        (["ls", "--stage", "lost"], 2, ["'lost'", "one of"]),
        (["ls", "--where", "{status: completed}"], 2, ["--where is not valid JSON", "quote"]),
        (["ls", "--where", "[]"], 2, ["a query is a map"]),
        (["ls", "--where", '{"colour": 1}'], 2, ["no field 'colour'", "staleness"]),
        (["ls", "--where", '{"status": "done"}'], 2, ["'done'", "completed"]),
        (["ls", "--where", '{"tries": {"$like": 1}}'], 2, ["no operator '$like'", "$between"]),
        (["ls", "--where", '{"tries": {"$between": [2, 1]}}'], 2, ["lowest, highest"]),
        (["ls", "--order", "colour"], 2, ["no field 'colour'"]),
        (["fence", "w7", "--yes"], 2, ["no worker 'w7'", "w0, w1"]),
        (["fence", "w0"], 2, ["would revoke 1 group of w0", "--yes"]),
    ],
)
def test_a_mistake_is_named_with_what_to_do(
    scene: Scene, command: Command, words: list[str], code: int, said: list[str]
) -> None:
    check(command(*words), code, *said)


def test_no_run_on_the_server(store: Store, command: Command) -> None:
    check(command("ls"), 5, "no run on", "rolloutmq run")


def test_several_runs_are_listed(scene: Scene, store: Store, command: Command) -> None:
    populate(store, "other")
    check(command("ls"), 2, "demo, other", "--run NAME")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = in_process("status", cwd=tmp_path, ROLLOUTMQ_DEBUG="1")
    assert done.returncode == 3
    assert "Traceback" in done.stderr
