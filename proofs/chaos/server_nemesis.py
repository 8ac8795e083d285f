"""Faults of the one server of a run: killed, its file cut, its disk full, its clock stepped."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from buffer.errors import StoreError
from buffer.redis.server.embedded import valkey_binary
from proofs.chaos.nemesis import SPELL_S, Nemesis
from proofs.chaos.plan import LEASE_MS, RUN, SERVER

STEP = """
for _, gid in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do redis.call('ZINCRBY', KEYS[1], ARGV[1], gid) end
redis.call('HINCRBY', KEYS[2], 'seen_ms', ARGV[1])
"""
"""Lua: leases and the clock as scripts saw it last, moved by ARGV[1] ms."""

ROOM_BYTES = 20_000
"""What still fits on a full disk."""


class ServerNemesis(Nemesis):
    """`after_start` is called when the server is up again; `loses`: the server may be made to lose
    what it acknowledged.
    """

    def __init__(self, *parts: Any, after_start: Callable[[], None], loses: bool) -> None:
        super().__init__(*parts)
        self._after_start = after_start
        self._loses = loses

    def _server_kinds(self) -> Sequence[str]:
        losing = ("lose_tail",) * 3 if self._loses else ()
        return ("server_kill", "server_kill", "clock", "clock", "disk_full", *losing)

    def _server_kill(self, _: str) -> None:
        self._note("server SIGKILL", SERVER)
        self._server.kill()
        self._start_server()

    def _start_server(self) -> None:
        try:
            self._server.start()
        except StoreError as error:
            if "Bad file format" not in str(error):
                raise
            self._repair_file()
            self._server.start()
        self._after_start()

    def _repair_file(self) -> None:
        """Do what an operator does with a file that a full disk damaged.

        With everysec, Redis 7.0 and Valkey 9.1 leave zeros behind a write that was cut, if the file
        was begun by BGREWRITEAOF; they cannot load it.
        """
        subprocess.run(
            ["valkey-check-aof", "--fix", str(self._file())],
            executable=str(valkey_binary()), input=b"y\n", check=True, capture_output=True,
        )  # fmt: skip
        self._note("server's file repaired", SERVER, loses=True)

    def _file(self) -> Path:
        folder: Path = self._server.folder / "appendonlydir"
        return max(folder.glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)

    def _lose_tail(self, _: str) -> None:
        """The end of the append-only file is gone, as after a power failure without fsync."""
        self._server.kill()
        file = self._file()
        size = file.stat().st_size
        lost = min(size, self._random.randrange(1, 60_000))
        with file.open("r+b") as aof:
            aof.truncate(size - lost)
        self._note("server loses the end of its file", SERVER, loses=True, bytes=lost)
        self._start_server()

    def _clock(self, _: str) -> None:
        """The server's clock steps; without libfaketime, what scripts remember of it goes the other
        way.
        """
        step_ms = self._random.choice((-1, 1)) * self._random.randrange(LEASE_MS, 3_600_000)
        start = f"rmq:{{{RUN}}}:"
        if not self._server.can_step:
            self._on_server(
                "clock step", "EVAL", STEP, "2", f"{start}leases", f"{start}clock", str(step_ms)
            )
            return
        self._server.step_to(step_ms // 1000)
        self._note("server clock stepped", SERVER, seconds=step_ms // 1000)

    def _disk_full(self, _: str) -> None:
        """The file may not grow any more. A server with appendfsync always gives up; others say
        MISCONF.
        """
        pid = self._server.pid
        if pid is None:
            return
        size = sum(
            file.stat().st_size
            for file in (self._server.folder / "appendonlydir").glob("*.incr.aof")
        )
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size + ROOM_BYTES, resource.RLIM_INFINITY))
        self._note("disk full", SERVER)
        self._in(SPELL_S, lambda: self._free_disk(pid))

    def _free_disk(self, pid: int) -> None:
        if self._server.pid == pid:
            resource.prlimit(
                pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
        else:
            self._start_server()
