from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from buffer.errors import StoreError, StoreUnavailable
from buffer.redis.server.check import check_server
from buffer.redis.server.embedded import EmbeddedServer

START = """
import sys
from pathlib import Path
from buffer.redis.server.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]))
server.start()
print(server.pid)
"""


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "server")
    yield server
    server.kill()


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_server_passes_its_own_check_when_it_has_started(embedded: EmbeddedServer) -> None:
    embedded.start()
    with embedded.connect() as client:
        assert [str(found) for found in check_server(client) if found.level != "ok"] == []
        assert client.info("server")["process_id"] == embedded.pid


def test_data_survives_when_the_server_is_stopped(embedded: EmbeddedServer) -> None:
    embedded.start()
    with embedded.connect() as client:
        client.set("key", "value")
    embedded.stop()
    embedded.stop()
    assert (embedded.is_running, embedded.pid) == (False, None)
    embedded.start()
    with embedded.connect() as client:
        assert client.get("key") == b"value"


def test_start_adopts_the_server_that_already_runs(embedded: EmbeddedServer) -> None:
    embedded.start()
    other = EmbeddedServer(embedded.folder)
    other.start()
    assert other.pid == embedded.pid
    other.stop()
    assert not embedded.is_running


def test_a_server_that_ended_here_and_was_started_elsewhere_is_adopted_while_it_loads(
    embedded: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.start()
    embedded.kill()
    other = EmbeddedServer(embedded.folder)
    other.start()
    loads = iter([True, True])
    monkeypatch.setattr(embedded, "_is_loading", lambda: next(loads, False))
    embedded.start()
    assert embedded.pid == other.pid
    other.stop()


def test_server_outlives_the_process_that_started_it(embedded: EmbeddedServer) -> None:
    command = [sys.executable, "-c", START, str(embedded.folder)]
    started = subprocess.run(command, capture_output=True, text=True, check=True)
    assert embedded.pid == int(started.stdout)
    assert os.getsid(int(started.stdout)) == int(started.stdout)
    embedded.start()
    assert embedded.pid == int(started.stdout)


def test_starting_from_many_processes_at_once_makes_one_server(embedded: EmbeddedServer) -> None:
    command = [sys.executable, "-c", START, str(embedded.folder)]
    starters = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    pids = {starter.communicate()[0].strip() for starter in starters}
    assert pids == {str(embedded.pid)}


def test_stale_files_do_not_matter_when_no_server_runs(embedded: EmbeddedServer) -> None:
    embedded.start()
    embedded.kill()
    (embedded.folder / "valkey.pid").write_text(
        f"{os.getpid()}\n"
    )  # reused by an innocent process: this one
    assert embedded.socket_path.exists()
    assert embedded.pid is None
    embedded.stop()
    embedded.start()
    assert embedded.pid not in (None, os.getpid())


def test_a_server_that_could_not_write_its_pid_is_adopted_and_stopped(
    embedded: EmbeddedServer,
) -> None:
    embedded.start()
    (embedded.folder / "valkey.pid").write_text("")  # as on a full disk
    other = EmbeddedServer(embedded.folder)
    other.start()
    other.stop(timeout_s=10.0)
    assert not embedded.is_running


def test_no_second_server_starts_when_the_first_has_lost_its_socket(
    embedded: EmbeddedServer,
) -> None:
    embedded.start()
    embedded.socket_path.unlink()
    with pytest.raises(StoreUnavailable, match="does not answer") as caught:
        EmbeddedServer(embedded.folder, deadline_s=0.2).start()
    assert f"kill {embedded.pid}" in str(caught.value)
    embedded.stop()
    embedded.start()


def test_a_failed_start_shows_the_end_of_the_log(embedded: EmbeddedServer, tmp_path: Path) -> None:
    embedded.start()
    embedded.stop()
    broken = next((embedded.folder / "appendonlydir").glob("*.manifest"))
    broken.write_text("nonsense\n")
    with pytest.raises(StoreError, match=r"stopped while starting \(exit code 1\)") as caught:
        embedded.start()
    assert "manifest" in str(caught.value)
    assert str(embedded.log_path) in str(caught.value)


def test_a_port_is_not_shared_with_another_server(tmp_path: Path, unused_tcp_port: int) -> None:
    with EmbeddedServer(tmp_path / "first", port=unused_tcp_port) as first:
        assert first.url == f"redis://127.0.0.1:{unused_tcp_port}/0"
        with pytest.raises(StoreError, match="Address already in use"):
            EmbeddedServer(tmp_path / "second", port=unused_tcp_port).start()


@pytest.mark.parametrize("name", ['a "quoted" name', "50% of # it?", "deep/" * 30, "ünï"])
def test_any_folder_will_do(tmp_path: Path, name: str) -> None:
    with EmbeddedServer(tmp_path / name) as server:
        assert len(os.fsencode(server.socket_path)) <= 107
        again = EmbeddedServer(tmp_path / name)
        assert again.url == server.url
        with again.connect() as client:
            assert client.ping()


def test_a_long_folder_has_one_socket_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long/" * 30)))
    at_once = Barrier(PROCESSES := 8)

    def path(folder: Path) -> Path:
        at_once.wait()
        return EmbeddedServer(folder).socket_path

    for number in range(20):
        folder = tmp_path / f"{number}" / ("deep/" * 30)
        if number == 19:  # as left by a process that died while it wrote
            folder.mkdir(parents=True)
            (folder / "socket_folder").touch()
        with ThreadPoolExecutor(PROCESSES) as threads:
            (found,) = set(threads.map(path, [folder] * PROCESSES))
        assert len(os.fsencode(found)) <= 107
        found.parent.rmdir()


READ = """
import sys
from pathlib import Path
from buffer.redis.server.embedded import EmbeddedServer
with EmbeddedServer(Path(sys.argv[1])).reading():
    print("reads", flush=True)
    sys.stdin.read()
"""


class Reader:
    """A process that reads a server; it ends in order, or by SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READ, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout
        assert self.process.stdout.readline() == "reads\n"

    def end(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize(
    "history",
    [
        "a+ b+ a- b-", "a+ own a- leave", "own a+ leave b+ a- b-", "own a+ a- leave", "a+ a! b+ b-",
        "a+ a! own b+ b- b+ leave b-", "own a+ leave own a- leave",
    ],
)  # fmt: skip
def test_a_server_ends_with_its_last_reader_unless_it_has_an_owner(
    embedded: EmbeddedServer, history: str
) -> None:
    """+ and -: a reader comes and ends; !: it is killed. The server is there until the last."""
    moves = history.split()
    readers: dict[str, Reader] = {}
    for left, move in zip(reversed(range(len(moves))), moves, strict=True):
        match move[-1]:
            case "+":
                readers[move[0]] = Reader(embedded.folder)
            case "-":
                readers.pop(move[0]).end()
            case "!":
                readers.pop(move[0]).kill()
            case _:
                embedded.start() if move == "own" else embedded.leave()
        assert embedded.is_running == (left > 0), (move, left)


def test_a_reader_waits_for_the_one_that_stops_the_server(embedded: EmbeddedServer) -> None:
    reader = Reader(embedded.folder)
    for _ in range(5):
        with reader.process as ending:
            assert ending.stdin
            ending.stdin.close()  # it ends while the next one comes
            reader = Reader(embedded.folder)
        assert ending.returncode == 0
        with embedded.connect() as client:
            assert client.ping()
    reader.end()
    assert not embedded.is_running
