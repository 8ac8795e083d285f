"""The server of a chaos run. Its wall clock can be stepped, where libfaketime (Debian: faketime) is
installed.

What time it is matters in one place only: scripts ask the server (TIME). Clients count with
monotonic clocks, which nobody can step; so does the server's own event loop, which is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from buffer.redis.server.embedded import EmbeddedServer
from proofs.chaos.plan import SERVER
from proofs.chaos.way import Way

LIBRARIES = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")


class SteppedServer(EmbeddedServer):
    """`can_step`: whether its clock can be moved at all."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        found = [
            path for pattern in LIBRARIES for path in Path("/").glob(pattern.removeprefix("/"))
        ]
        self.can_step = bool(found)
        self._offset = folder / "clock"
        self._preload = {
            "LD_PRELOAD": str(found[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._offset),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
        } if found else {}  # fmt: skip

    @property
    def ways(self) -> list[Way]:
        """How clients reach it."""
        return [Way(SERVER, str(self.socket_path))]

    def url_by(self, ports: Mapping[str, int]) -> str:
        return f"redis://127.0.0.1:{ports[SERVER]}/0"

    judge_url_by = url_by

    def config_set(self, name: str, value: str) -> None:
        """Change a setting."""
        with self.connect() as client:
            client.config_set(name, value)

    def step_to(self, seconds: int) -> None:
        """From a second from now on its clock is so much before, or behind, this machine's."""
        part = self._offset.with_suffix(".part")
        part.write_text(f"{seconds:+d}\n", encoding="utf-8")
        part.rename(self._offset)

    def start(self) -> None:
        """As an embedded server does."""
        if self.can_step and not self._offset.exists():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.step_to(0)
        with _environment(self._preload):
            super().start()


@contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    """This process's, which a server that is started inherits."""
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            del os.environ[name]
