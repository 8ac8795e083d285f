"""`rolloutmq create`: make the run of a config on its server, and start nothing."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from buffer.control.settings_record import SettingsRecord
from buffer.open_run import open_store
from buffer.redis.connection.url import mask_url
from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.config.config import Config
from rolloutmq.config.sources import fetch
from rolloutmq.launch.create_run import make_run
from rolloutmq.launch.preparation import is_done, prepare_model, prepare_problems, start_server
from rolloutmq.views.setting_view import override_lines


@dataclass(frozen=True, slots=True)
class Creation:
    """A new or found run. `taken`: its newest train step.

    `server`: its own server, None with a URL; it is stopped unless it ran before.
    """

    name: str
    nonce: str
    taken: int
    url: str
    server: EmbeddedServer | None
    folder: Path
    model: Path
    changes: list[str]
    settings: SettingsRecord

    def facts(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "nonce": self.nonce,
            "taken": self.taken,
            "url": mask_url(self.url),
            "folder": str(self.folder),
            "model": str(self.model),
            "changes": self.changes,
            "set": {name: each.value for name, each in self.settings.overrides.items()},
        }

    def lines(self, command: Sequence[str]) -> list[str]:
        """Return what was made and what to start next; `command`: the config and overrides."""
        config = shlex.join(command)
        own = f"  rolloutmq server --run-dir {self.folder}"
        where = "the run's own, only running while it is needed" if self.server else "shared"
        state = f"is at step {self.taken}" if self.taken else "is ready to start"
        return [
            f"server   {mask_url(self.url)} ({where})",
            f"model    {self.model}",
            f"run      {self.name} {state}; its folder is {self.folder}",
            *(f"changed  {change}" for change in self.changes),
            *(f"set      {line}" for line in override_lines(self.settings)),
            "",
            "to start all of its processes on this machine:",
            f"  rolloutmq run {config}",
            "or one by one:",
            *([own] if self.server else []),
            f"  rolloutmq producer {config}",
            f"  rolloutmq worker {config}",
            f"  rolloutmq train {config}",
            "or, in place of the last one, a trainer of your own:",
            f'  RolloutConsumer(Run.open(Store("{mask_url(self.url)}"), "{self.name}"))',
        ]


def create(
    config: Config, command: Sequence[str], redis_url: str | None, *, quiet: bool
) -> Creation:
    """Create the run of `config`, or open it again. Raises RunExists, LostRun, ConfigError."""
    config = fetch(config)
    prepare_problems(command)
    with _server(config, redis_url) as (url, server):
        store = open_store(config, url, name="rolloutmq-create")
        model = prepare_model(config, command, quiet=quiet)
        run = make_run(store, config, model, is_done=partial(is_done, config))
        taken = run.ledger.steps().taken
        store.close()
    folder = config.run.folder
    return Creation(
        run.name, run.nonce, taken, url, server, folder, model, run.changes, run.settings
    )


@contextmanager
def _server(config: Config, redis_url: str | None) -> Iterator[tuple[str, EmbeddedServer | None]]:
    """Yield the URL and the embedded server, which afterwards runs only if it did before."""
    # a signal must not leave the server behind
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    was_running = EmbeddedServer(config.run.folder / "server").is_running
    url, server = start_server(config, redis_url)
    try:
        yield url, server
    finally:
        if server and not was_running:
            server.stop()
