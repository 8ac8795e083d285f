"""`rolloutmq create`: make the run of a config on its server, and start nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from buffer.errors import raise_together
from buffer.open_run import embedded_server, open_store
from buffer.redis.connection.url import mask_url
from rolloutmq.config.config import Config
from rolloutmq.config.sources import fetch
from rolloutmq.hang_up import interrupted_by_sigterm
from rolloutmq.launch.create_run import make_run
from rolloutmq.launch.preparation import is_done, prepare_model, quick_errors
from rolloutmq.options import set_flags
from rolloutmq.views.setting_view import override_lines


def create(
    config: Config, path: Path, overrides: list[str], redis_url: str | None, *, quiet: bool
) -> tuple[dict[str, Any], list[str]]:
    """Create the run of `config`, or open it again; return facts and lines about it.

    Raises RunExists, LostRun, ConfigError.
    """
    config = fetch(config)
    raise_together(quick_errors([str(path), *overrides]))
    command = [str(path), *set_flags(overrides)]
    with (
        _server(config, redis_url) as (url, is_own),
        closing(open_store(config, url, name="rolloutmq-create")) as store,
    ):
        model = prepare_model(config, command, quiet=quiet)
        run = make_run(store, config, model, is_done=partial(is_done, config))
        taken = run.ledger.steps().taken
    facts = {
        "run": run.name,
        "nonce": run.nonce,
        "taken": taken,
        "url": mask_url(url),
        "folder": str(config.run.folder),
        "model": str(model),
        "changes": run.changes,
        "set": {name: each.value for name, each in run.settings.overrides.items()},
    }
    changes = [f"changed  {change}" for change in run.changes]
    changes += [f"set      {line}" for line in override_lines(run.settings)]
    return facts, _lines(facts, changes, command, is_own=is_own)


def _lines(
    facts: dict[str, Any],
    changes: list[str],
    command: Sequence[str],
    *,
    is_own: bool,
) -> list[str]:
    """Return what was made and what to start next; `command`: the config and overrides."""
    config = shlex.join(command)
    run, url, folder, taken = (facts[name] for name in ("run", "url", "folder", "taken"))
    where = "the run's own, only running while it is needed" if is_own else "shared"
    state = f"is at step {taken}" if taken else "is ready to start"
    return [
        f"server   {url} ({where})",
        f"model    {facts['model']}",
        f"run      {run} {state}; its folder is {folder}",
        *changes,
        "",
        "to start all of its processes on this machine:",
        f"  rolloutmq run {config}",
        "or one by one:",
        *([f"  rolloutmq server --run-dir {folder}"] if is_own else []),
        *(f"  rolloutmq {verb} {config}" for verb in ("producer", "worker", "train")),
        "or, in place of the last one, a trainer of your own:",
        f'  RolloutConsumer(Run.open(Store("{url}"), "{run}"))',
    ]


@contextmanager
def _server(config: Config, redis_url: str | None) -> Iterator[tuple[str, bool]]:
    """Yield the URL, and whether the server is embedded: it then runs on only if it did before."""
    if url := config.redis.resolve_url(redis_url):
        yield url, False
        return
    server = embedded_server(config)
    with interrupted_by_sigterm(), server.reading():
        yield server.url, True
