"""Prepare what the processes of a run need: a server, problems, and a model or a small one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from buffer.errors import RoleHeld, RolloutMQError, raise_together
from buffer.run.open import run_nonce
from buffer.run.run import Run
from buffer.run.settings import KeptSettings
from consumer.grpo.models.model_folder import check_model_folder
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.step_log import read_evaluations
from producer_workers.follow_owner import OWNER
from rolloutmq.check.contained import STAGES, run_units
from rolloutmq.check.machine import machine_errors
from rolloutmq.config.config import Config
from rolloutmq.config.sources import fetch, names_any
from rolloutmq.views.run_view import read_run_view


def check_start(config: Config, command: Sequence[str]) -> Config:
    """Raise any error that would end the run at its start, within seconds and without a model.

    Writes generated problems, and downloads from the Hub unless a mistake is known before; the
    returned config has the commits. `command`: its path and overrides.
    """
    errors: list[RolloutMQError] = machine_errors(config)
    if names_any(config):
        raise_together(errors + quick_errors(command, "functions"))
    config = fetch(config)
    raise_together(errors + quick_errors(command))
    return config


def quick_errors(command: Sequence[str], *stages: str) -> list[RolloutMQError]:
    """Make the quick checks of `rolloutmq check`; write generated problems."""
    found = run_units(stages or STAGES, command, quick=True)
    return [finding.error() for finding in found if finding.level == "error"]


def prepare_model(config: Config, command: Sequence[str], *, quiet: bool = False) -> Path:
    """Return the config's model, or the small one that is built and warm-started here once."""
    folder = config.model_folder
    if config.policy.model is None and not folder.exists():
        run_command(["warm-start", *command], quiet=quiet)
    check_model_folder(folder)
    return folder


def await_roles(run: Run, report: Callable[[str], None]) -> None:
    """Wait until trainer and producer of a killed launcher have exited. Raises RoleHeld."""
    end = time.monotonic() + 2 * run.limits.role_timeout_ms / 1000
    is_reported = False
    while held := [
        role for role in ("trainer", "producer") if getattr(read_run_view(run), role).is_alive
    ]:
        if time.monotonic() > end:
            raise RoleHeld(
                f"run {run.name!r} has a live {' and a live '.join(held)} that this "
                "command did not start",
                hint="stop it first; `rolloutmq train CONFIG --take-over` fences a "
                "trainer that cannot be stopped",
            )
        if not is_reported:
            report(f"waiting   for the {' and the '.join(held)} of an earlier start to exit")
            is_reported = True
        time.sleep(0.2)


def last_step(config: Config) -> int:
    """Return the last step of the run by its folder: `rolloutmq set` may have changed it."""
    folder = config.run.folder
    if not (folder / "run.json").exists():
        return config.plan.steps
    record = KeptSettings(folder, run_nonce(folder)).read()
    changed = record.overrides.get("steps") if record else None
    return int(changed.value) if changed else config.plan.steps


def is_done(config: Config, last: int) -> bool:
    """Return whether the last step is in a checkpoint, and its weights are evaluated."""
    evaluations = read_evaluations(config.run.folder)
    newest = max(CheckpointFolder(config.run.folder / "checkpoints").steps(), default=0)
    evaluated = all((task, last) in evaluations for task in config.held_out_tasks)
    return newest > last or (newest == last and evaluated)


def run_command(args: list[str], *, quiet: bool = True) -> None:
    """Run a command in its own process, so that this one loads neither torch nor data sets."""
    done = subprocess.run(
        [sys.executable, "-m", "rolloutmq", *args],
        env=os.environ | {OWNER: str(os.getpid())},
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        check=False,
    )
    if done.returncode:
        what = f"`rolloutmq {args[0]}` ended with exit code {done.returncode}"
        # report its error as if it were this process's own
        printed = (done.stderr or "").strip().removeprefix("error: ")
        message, _, hint = printed.partition("\nhint:  ")
        error = RolloutMQError(message or f"{what}; see above", hint=hint)
        error.exit_code = done.returncode if done.returncode > 0 else 1
        raise error
