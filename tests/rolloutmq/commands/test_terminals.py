from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from buffer.control.control import Mode
from buffer.maintenance.remove_run import remove_run
from buffer.redis.keys import Keys
from buffer.redis.server.acl import acl_line, user_name
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from rolloutmq.command_list import all_commands
from tests.buffer.redis.server.test_acl import words
from tests.rolloutmq.conftest import ROOT, Command, in_process, json_of, rolloutmq
from tests.rolloutmq.populate import Scene, forge, populate

COMMANDS: dict[str, Any] = all_commands()
ENDLESS = ("web", "metrics", "gpu-check", "server", "doctor", "drain", "janitor", "eval", "run")
"""Commands that run until they are stopped, take minutes, or look at the whole machine."""
BAD = ("", "-1", str(2**70), ".")


def calls(name: str) -> Iterator[list[str]]:
    """Return the command with each of its options and arguments wrong in each way."""
    parameters = COMMANDS[name].params
    arguments = [one for one in parameters if not one.opts[0].startswith("-")]
    flags = [one for one in parameters if one.opts[0].startswith("--") and not one.is_flag]
    for value in BAD:
        if arguments:
            yield [name, *([value] * len(arguments))]
        for flag in flags:
            if flag.opts[0] not in ("--redis-url", "--run-dir"):
                yield [name, *(["math-0000000001"] * len(arguments)), flag.opts[0], value]


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - set(ENDLESS)))
def test_no_option_ends_in_a_traceback(
    command: Command, server: EmbeddedServer, scene: Scene, tmp_path: Path, name: str
) -> None:
    takes_run_dir = any("--run-dir" in one.opts for one in COMMANDS[name].params)
    where = ["--run-dir", str(server.folder)] if takes_run_dir else []
    for call in calls(name):
        with limited(20):
            done = command(*call, *where, cwd=tmp_path)  # some write the folder or file they name
        assert "Traceback" not in done.stderr, call
        assert done.returncode in (0, 1, 2, 3, 4, 5, 6), call


def test_any_terminal_gets_the_screen(server: EmbeddedServer, scene: Scene) -> None:
    done = rolloutmq("status", "--run-dir", str(server.folder), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_a_full_disk_is_one_line(server: EmbeddedServer, scene: Scene) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rolloutmq", "status", "--run-dir", str(server.folder)],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=400,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error: the output, or a file: No space left on device"
    assert len(done.stderr.splitlines()) == 2


def test_tail_ends_with_its_run(server: EmbeddedServer, scene: Scene) -> None:
    scene.run.control.set_mode("operator", Mode.FINISH)
    done = in_process("logs", "events", "--run-dir", str(server.folder))
    assert done.returncode == 0
    assert done.stdout


TITLE = "\x1b]0;owned\x07\x1b[2J\u202e"
"""Sets the title, clears the screen, writes from right to left."""

LOOKS = (
    ("status",), ("workers",), ("doctor",), ("ls",), ("dead",), ("ls", "--stage", "dead"), ("fsck",),
    ("show", "math-0000000003"), ("batch", "2"), ("logs", "events"),
)  # fmt: skip


@pytest.fixture
def forged(scene: Scene) -> Scene:
    forge(scene, TITLE)
    return scene


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_no_command_lets_a_text_steer_the_terminal(
    forged: Scene, command: Command, words: tuple[str, ...]
) -> None:
    done = command(*words)
    assert done.returncode in (0, 1, 6), done.stderr
    for code in ("\x1b", "\x07", "\u202e"):
        assert code not in done.stdout + done.stderr


@pytest.mark.parametrize("words", [("status", "--json"), ("workers", "--json")], ids=" ".join)
def test_no_program_is_told_less_because_of_a_number_that_is_none(
    forged: Scene, command: Command, words: tuple[str, ...]
) -> None:
    told = json_of(command(*words))
    workers = told["workers"] if isinstance(told, dict) else told
    assert [worker["id"] for worker in workers] == ["w0", "w1"]
    assert {worker["tokens_per_s"] for worker in workers} == {0.0}


VIEWS = (
    "status", "workers", "ls", "show math-0000000001", "batch 2", "dead", "metrics", "runs", "export {folder}/groups.jsonl",
)  # fmt: skip
STEERS = (
    *VIEWS, "doctor", "fsck", "pause", "resume", "set max_tries=5", "janitor --once", "requeue math-0000000005 --yes",
    "drop math-0000000005 --yes", "fence w1 --yes", "fence w0 --yes", "import {folder}/groups.jsonl --task math", "pause", "save {folder}/saved",
    "REMOVE", "restore {folder}/saved", "status", "resume",
)  # fmt: skip
"""In this order; REMOVE removes the run, which nobody uses any more."""


@pytest.fixture
def raw(server: EmbeddedServer, store: Store) -> Iterator[Any]:
    populate(store)
    with server.connect() as client:
        for role in ("viewer", "operator"):
            client.execute_command("ACL", "SETUSER", *words(acl_line("demo", role, "secret")))
        yield client


@pytest.mark.parametrize(("role", "lines"), [("viewer", VIEWS), ("operator", STEERS)])
def test_each_command_is_denied_nothing(
    server: EmbeddedServer, raw: Any, role: str, lines: tuple[str, ...], tmp_path: Path
) -> None:
    url = server.url.replace("unix://", f"unix://{user_name('demo', role)}:secret@")
    raw.acl_log_reset()
    for line in lines:
        if line == "REMOVE":
            raw.sadd("rq:queues:rmq-judge:demo", "rq:queue:rmq-judge:demo")
            store = Store(url, deadline_s=400.0)
            remove_run(store, Keys("demo"))
            store.close()
            continue
        done = in_process(*line.format(folder=tmp_path).split(), REDIS_URL=url)
        assert done.returncode == 0, (line, done.stderr)
        assert [entry["object"] for entry in raw.acl_log()] == [], line


def test_a_viewer_is_told_what_it_cannot_see_or_change(server: EmbeddedServer, raw: Any) -> None:
    url = server.url.replace("unix://", f"unix://{user_name('demo', 'viewer')}:secret@")
    assert in_process("fsck", REDIS_URL=url).returncode == 0
    assert "CONFIG GET is forbidden for this user" in in_process("doctor", REDIS_URL=url).stdout
    refused = in_process("pause", REDIS_URL=url)
    assert refused.returncode != 0
    assert "use the user of a role that may" in refused.stderr
