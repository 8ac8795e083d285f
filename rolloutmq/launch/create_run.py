"""Create the run of a config on its server, continue it, or make it again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from redis.exceptions import NoPermissionError

from buffer.control.continuation import Start
from buffer.control.live_settings import KeptSettings
from buffer.errors import ConfigError, LostRun, RunExists
from buffer.ledger.position import Position
from buffer.maintenance.regeneration import Regeneration
from buffer.open_run import embedded_server, run_nonce, write_nonce
from buffer.redis.store import Store
from buffer.run import Run
from buffer.wire.rollout import FIRST_WEIGHTS
from consumer.grpo.checkpoint import CheckpointFolder
from rolloutmq.config.config import Config
from rolloutmq.config.fingerprint import origin_of

log = logging.getLogger("rolloutmq.store")


def make_run(
    store: Store,
    config: Config,
    model: Path,
    *,
    by_hand: bool = True,
    is_done: Callable[[int], bool] = lambda steps: False,
) -> Run:
    """Return the run of this config, and create it if it is new; see `create_run`.

    Raises LostRun if the server lacks a run with checkpoints: `make_again` must create it (I6).
    """
    steps = CheckpointFolder(config.run.folder / "checkpoints").steps()
    if steps and config.run.name not in Run.names(store):
        raise LostRun(
            f"run {config.run.name!r} has a checkpoint of step {steps[-1]}, but there is no such "
            "run on this server",
            hint="connect to the server that holds it, or restore its data (`rolloutmq restore`); "
            "or start with --regenerate: what was not trained yet is then generated again",
        )
    return create_run(store, config, model, by_hand=by_hand, is_done=is_done)


def make_again(
    store: Store,
    config: Config,
    model: Path,
    say: Callable[[str], object],
    *,
    take_over: bool = False,
) -> Run:
    """Clear the run on the server, and make it again from the newest whole checkpoint.

    `say` gets a sentence about what goes, before any change. Raises ModelError if no checkpoint is
    whole, RoleHeld while a trainer is alive (unless `take_over`), RunExists.
    """
    position = CheckpointFolder(config.run.folder / "checkpoints").newest_whole()
    regeneration = Regeneration(position or Position(), take_over=take_over)
    left = regeneration.leftovers(store, config.run.name, list(config.tasks))
    say(regeneration.describe(config.run.name, left))
    return create_run(store, config, model, regeneration)


def create_run(
    store: Store,
    config: Config,
    model_dir: Path,
    regeneration: Regeneration | None = None,
    *,
    by_hand: bool = True,
    is_done: Callable[[int], bool] = lambda steps: False,
) -> Run:
    """Create the run of this config, or continue it with this config (`Run.changes`).

    With `regeneration`, clear it on the server first. Without `by_hand`, an existing run keeps its
    settings. `is_done` returns whether a run of that many steps is complete and stays finished.
    Raises RunExists if the name is another folder's, ConfigError if maxmemory is too small or an
    edited config cannot continue the run.
    """
    maxmemory = maxmemory_bytes(store)
    if problem := config.memory_problem(config.memory.budget(maxmemory)):
        raise ConfigError(problem)
    config.run.make_folder()  # the umask of a process that is not ours is not changed
    if regeneration is None:
        _restore_nonce(store, config)
    elif regeneration.position.run_nonce and not (config.run.folder / "run.json").exists():
        write_nonce(config.run.folder, regeneration.position.run_nonce)
    nonce = run_nonce(config.run.folder)
    limits = config.limits(maxmemory)
    path = str(model_dir.resolve())
    origin = origin_of(config, model_dir)
    kept = KeptSettings(config.run.folder, nonce)
    start = Start(by_hand, config.written(), kept.read, is_done)
    run = Run.create(
        store, config.run.name, nonce, limits, FIRST_WEIGHTS, path, origin, start, regeneration
    )
    kept.keep(run.settings)
    return run


def _restore_nonce(store: Store, config: Config) -> None:
    """Rewrite a lost run.json if the server's run belongs to this folder. Raises RunExists."""
    folder = config.run.folder
    if (folder / "run.json").exists() or config.run.name not in Run.names(store):
        return
    nonce = Run.open(store, config.run.name).nonce
    if store.url != embedded_server(config).url:
        raise RunExists(
            f"another run named {config.run.name!r} is on this server, or {folder} has lost its "
            "run.json, by which a folder knows its run",
            hint="choose another [run] name; or, if this folder is that run's, write the file "
            f'again: echo \'{{"nonce": "{nonce}"}}\' > {folder}/run.json',
        )
    log.warning("%s/run.json was lost, and is written again", folder)
    write_nonce(folder, nonce)


def maxmemory_bytes(store: Store) -> int:
    """Return the smallest maxmemory of the servers; 0 if none has or reports one."""
    found: list[int] = []
    for _, client in store.servers.masters():
        with suppress(NoPermissionError):
            found.append(int(client.info("memory").get("maxmemory", 0)))
    return min((size for size in found if size), default=0)
