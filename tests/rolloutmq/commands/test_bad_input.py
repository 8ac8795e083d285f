from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from tests.rolloutmq.conftest import ROOT, Command, in_process
from tests.rolloutmq.populate import Scene, populate
from tests.servers import SAFE, start_redis


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


CONFIG = str(ROOT / "configs" / "demo.toml")
ARGUMENTS = {"worker": (CONFIG, "--set", "redis.deadline_s=0.1")}

NO_URL = (2, "no URL of a Redis server")
NOBODY = (3, "no server listens there")
URLS = {
    "redis://127.0.0.1:1/0": NOBODY,
    "rediss://127.0.0.1:1/0": NOBODY,
    "redis://127.0.0.1:1,127.0.0.1:2/0": NOBODY,
    "redis+sentinel://127.0.0.1:1/primary": (3, "no Sentinel names a primary"),
    "redis+sentinel://127.0.0.1:1": NO_URL,
    "redis://no-such-host.invalid/0": (3, "host name is not known"),
    f"redis://{'x' * 70}.y/0": NO_URL,
    "redis://127.0.0.1:99999/0": NO_URL,
    "redis://[::1/0": NO_URL,
    "http://127.0.0.1/": NO_URL,
    "localhost": NO_URL,
    "unix:///nowhere.sock": (3, "there is no such socket"),
    f"unix:///{'x' * 200}": (3, "path of the socket is too long"),
    "unix://": NO_URL,
    "unix://FOLDER": NOBODY,
    "unix://FOLDER/file": NOBODY,
    "unix://nobody:wrong@SOCKET": (3, "refuses the user or password"),
    "unix://no-rights:pw@SOCKET": (3, "ACL"),
    "unix://SOCKET?db=99": (3, "no such database"),
    **{
        f"unix://SOCKET?{option}": (2, f"'{option.partition('=')[0]}'")
        for option in (
            *("decode_responses=True", "encoding=latin-1", "protocol=3", "legacy_responses=0"),
            *("health_check_interval=1", "socket_timeout=0.001", "max_connections=1"),
            *("retry_on_timeout=yes", "client_name=x", "ssl_ca_certs=/ca.pem", "nonsense=1"),
        )
    },
    "redis://127.0.0.1:HTTP/0": (3, "not a Redis server"),
    "rediss://127.0.0.1:HTTP/0": (3, "does not use TLS"),
}
"""URL: exit code, words of the error. The words in capitals stand for what a fixture makes."""


@pytest.fixture(scope="module")
def names(
    server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("folder")
    (folder / "file").touch()
    with server.connect() as client, web_server() as port:
        client.execute_command("ACL", "SETUSER", "no-rights", "on", ">pw", "~*", "&*", "-@all")
        yield {"FOLDER": str(folder), "SOCKET": str(server.socket_path), "HTTP": str(port)}


@contextmanager
def web_server() -> Iterator[int]:
    def answer() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # shut down
                return
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("name", ["worker", "status"])
def test_one_clear_error(
    name: str, names: dict[str, str], command: Command, tmp_path: Path
) -> None:
    for form, (code, words) in URLS.items():
        url = form
        for word, value in names.items():
            url = url.replace(word, value)
        done = command(name, *ARGUMENTS.get(name, ()), "--redis-url", url, cwd=tmp_path)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
        assert done.returncode == code, (form, lines)
        assert [line[:7] for line in lines] == ["error: ", "hint:  "], (form, lines)
        assert words in done.stderr, (form, lines)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (("--appendonly", "no", "--save", ""), "appendonly"),
        ((*SAFE, "--maxmemory-policy", "allkeys-lru"), "maxmemory-policy"),
    ],
    ids=["no persistence", "evicts"],
)
def test_a_process_refuses_a_server_that_would_lose_data(
    options: tuple[str, ...], setting: str, command: Command, tmp_path: Path
) -> None:
    with start_redis(tmp_path / "redis", *options) as url:
        done = command("worker", *ARGUMENTS["worker"], "--redis-url", url, cwd=tmp_path)
    assert done.returncode == 3
    assert setting in done.stderr
