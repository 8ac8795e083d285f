"""Create the run of a config on its server, continue it, or make it again from a checkpoint."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from redis.exceptions import NoPermissionError

from buffer.control.roles import HeldRole
from buffer.errors import ConfigError, LostRun, RoleHeld, RunExists, raise_together
from buffer.ledger.position import Position
from buffer.maintenance.regeneration import Regeneration
from buffer.redis.store import Store
from buffer.redis.url import mask_url
from buffer.run.continuation import Start
from buffer.run.open import embedded_server, open_store, run_nonce, write_nonce
from buffer.run.run import Run
from buffer.run.settings import KeptSettings
from buffer.wire.rollout import FIRST_WEIGHTS
from consumer.handle.checkpoint import CheckpointFolder
from rolloutmq.config.config import Config
from rolloutmq.config.fingerprint import origin_of
from rolloutmq.config.kept_config import keep_config
from rolloutmq.config.sources import fetch
from rolloutmq.hang_up import interrupted_by_sigterm
from rolloutmq.launch.prepare import is_done, prepare_model, quick_errors
from rolloutmq.options import set_flags
from rolloutmq.presets import find_config
from rolloutmq.views.setting_view import override_lines

log = logging.getLogger("rolloutmq.store")


def create_and_describe(
    config: Config, path: Path, overrides: list[str], redis_url: str | None, *, quiet: bool
) -> tuple[dict[str, Any], list[str]]:
    """Create the run of `config`, or open it again, and start nothing; return facts, and lines.

    An embedded server runs on only if it did before. Raises RunExists, LostRun, ConfigError.
    """
    config = fetch(config)
    raise_together(quick_errors([str(path), *overrides]))
    command = [str(path), *set_flags(overrides)]
    with ExitStack() as stack:
        url, server = config.redis.resolve_url(redis_url), None
        if not url:
            server = embedded_server(config)
            stack.enter_context(interrupted_by_sigterm())
            stack.enter_context(server.reading())
            url = server.url
        store = stack.enter_context(closing(open_store(config, url, name="rolloutmq-create")))
        model = prepare_model(config, command, quiet=quiet)
        run = create_run(store, config, model, is_done=partial(is_done, config))
        keep_config(config, find_config(path), overrides)
        taken = run.ledger.steps().taken
    folder = str(config.run.folder)
    facts = {
        "run": run.name,
        "nonce": run.nonce,
        "taken": taken,
        "url": mask_url(url),
        "folder": folder,
        "model": str(model),
        "changes": run.changes,
        "set": {name: each.value for name, each in run.settings.overrides.items()},
    }
    given = shlex.join(command)
    where = "the run's own, only running while it is needed" if server else "shared"
    state = f"is at step {taken}" if taken else "is ready to start"
    return facts, [
        f"server   {mask_url(url)} ({where})",
        f"model    {model}",
        f"run      {run.name} {state}; its folder is {folder}",
        *(f"changed  {change}" for change in run.changes),
        *(f"set      {line}" for line in override_lines(run.settings)),
        "",
        "to start all of its processes on this machine:",
        f"  rolloutmq run {given}",
        "or one by one:",
        *([f"  rolloutmq server --run-dir {folder}"] if server else []),
        *(f"  rolloutmq {verb} {given}" for verb in ("producer", "worker", "train")),
        "or, in place of the last one, a trainer of your own:",
        f'  RolloutConsumer(Run.open(Store("{mask_url(url)}"), "{run.name}"))',
    ]


def create_again(
    store: Store,
    config: Config,
    model: Path,
    say: Callable[[str], object],
    *,
    take_over: bool = False,
    wait_s: float = 0.0,
) -> Run:
    """Clear the run on the server, and make it again from the newest whole checkpoint.

    `say` gets a sentence about what goes, before any change. Raises ModelError if no checkpoint is
    whole, RunExists, RoleHeld if a trainer is still alive after `wait_s` (unless `take_over`).
    """
    end = time.monotonic() + wait_s
    is_said = False
    while True:
        checkpoints = CheckpointFolder(config.run.folder / "checkpoints")
        position = checkpoints.newest_whole(has_state=not config.trainer.loop)
        regeneration = Regeneration(position or Position(), take_over=take_over)
        left = regeneration.leftovers(store, config.run.name, list(config.tasks))
        if not is_said:
            say(regeneration.describe(config.run.name, left))
            is_said = True
        try:
            run = create_run(store, config, model, regeneration)
            break
        except RoleHeld:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)
    if position:
        # a producer may open the run before its trainer, and would draw again what is trained
        role = HeldRole(run.control, "trainer")
        lineage = role.nonce[:8]  # of no weights
        run.trainers.open(role.nonce, lineage=lineage, position=position, regenerate=True)
        role.close()
    return run


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
    Raises LostRun if the server lacks a run with checkpoints, which `create_again` creates (I6),
    RunExists if the name is another folder's, ConfigError if maxmemory is too small or an edited
    config cannot continue the run.
    """
    steps = CheckpointFolder(config.run.folder / "checkpoints").steps()
    if steps and regeneration is None and config.run.name not in Run.names(store):
        raise LostRun(
            f"run {config.run.name!r} has a checkpoint of step {steps[-1]}, but there is no such "
            "run on this server",
            hint="connect to the server that holds it, or restore its data (`rolloutmq restore`); "
            "or start with --regenerate: what was not trained yet is then generated again",
        )
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
