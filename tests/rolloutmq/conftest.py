"""A real embedded server, a populated run on it, and the real command: in this process, or in one
of its own.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from rolloutmq.cli import main
from tests.rolloutmq.populate import Scene, populate

ROOT = Path(__file__).parents[2]

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("runs") / "demo") as embedded:
        yield embedded


@pytest.fixture
def store(server: EmbeddedServer) -> Iterator[Store]:
    opened = Store(server.url, deadline_s=400.0)
    opened.client.flushall()
    yield opened
    opened.close()


@pytest.fixture
def scene(store: Store) -> Scene:
    return populate(store)


@pytest.fixture
def command(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `rolloutmq ARGS…` in this process, against the server of this module."""
    clear_environment(monkeypatch)

    def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        where = [] if cwd else ["--run-dir", str(server.folder)]
        return call_main(*args, *where, cwd=cwd or ROOT)

    return run


def in_process(
    *args: str, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command in this process, which takes a second less than `rolloutmq`."""
    with pytest.MonkeyPatch.context() as patch:
        clear_environment(patch)
        for name, value in environment.items():
            patch.setenv(name, value)
        return call_main(*args, cwd=cwd)


def clear_environment(patch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "ROLLOUTMQ_DEBUG"):
        patch.delenv(name, raising=False)
    patch.setenv("COLUMNS", "80")


def call_main(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = ["rolloutmq", *args]
    out = io.StringIO()
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", words)
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
            main()
    return subprocess.CompletedProcess(
        words, int(left.value.code or 0), out.getvalue(), err.getvalue()
    )


def rolloutmq(*args: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own, on a screen of 80 columns."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("REDIS_URL", "ROLLOUTMQ_DEBUG")
    }
    return subprocess.run(
        [sys.executable, "-m", "rolloutmq", *args],
        cwd=cwd,
        env=kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "dumb"} | environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """What a command printed, after it succeeded."""
    assert done.returncode == 0, done.stderr
    return orjson.loads(done.stdout)
