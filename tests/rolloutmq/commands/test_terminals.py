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
from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.command_list import all_commands
from tests.rolloutmq.conftest import ROOT, Command, in_process, rolloutmq
from tests.rolloutmq.populate import Scene

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
