"""`rolloutmq stop`: end a run that `rolloutmq run` started on this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from consumer.grpo.checkpoint import CheckpointFolder
from rolloutmq.console import console
from rolloutmq.options import RUNS, AsJson, RunDir
from rolloutmq.output import age, emit
from rolloutmq.run_owner import LaunchRecord, Stage, choose_folder, interrupt, is_owned, read_record

EPILOG = """
\b
Examples: rolloutmq stop
          rolloutmq stop --run-dir runs/demo --now
"""

POLL_S = 0.2
"""Seconds between two looks at the run."""

Now = Annotated[
    bool,
    typer.Option(
        "--now",
        help="As a second Ctrl-C: kill its processes. The newest checkpoint is kept.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(stop)


def stop(now: Now = False, run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """Stop a run that `rolloutmq run` started, and wait for its end.

    It does what Ctrl-C does: the trainer writes a checkpoint, workers return what they hold, the
    run's own server stops last. The same `rolloutmq run` continues it. Ctrl-C here only ends the
    wait. Without --run-dir, it is the running one under ./runs.
    """
    folder = choose_folder(run_dir, RUNS)
    begin = time.monotonic()
    before = interrupt(folder, at_once=now)
    if not as_json:
        how = "at once" if now else "in order"
        console().print(f"run {before.run} in {folder}: stopping {how} (process {before.pid})")
    _wait(folder, quiet=as_json)
    _report(folder, read_record(folder) or before, time.monotonic() - begin, as_json)


def _wait(folder: Path, *, quiet: bool) -> None:
    """Wait for the end of the owner; print what it waits for."""
    shown = ""
    while is_owned(folder):
        record = read_record(folder)
        if record and record.detail not in ("", shown) and not quiet:
            shown = record.detail
            console().print(f"  {shown}")
        time.sleep(POLL_S)


def _report(folder: Path, record: LaunchRecord, took_s: float, as_json: bool) -> None:
    steps = CheckpointFolder(folder / "checkpoints").steps()
    step = steps[-1] if steps else 0
    if as_json:
        facts = record.model_dump(include={"run", "stage", "steps", "detail", "account"})
        emit(facts | {"checkpoint": step, "took_s": round(took_s, 3)})
    elif record.stage is Stage.FINISHED:
        console().print(f"run {record.run} had just finished all {record.steps} steps")
    else:
        # `set` may have raised the number of steps since the start
        of = f" of {record.steps}" if step <= record.steps else ""
        done = f"at step {step}{of}" if step else "before its first checkpoint"
        rest = "".join(f"; {part}" for part in (record.detail, record.account) if part)
        took = age(took_s * 1000)
        console().print(
            f"run {record.run} {record.stage} {done}, after {took}{rest}", soft_wrap=True
        )
    if record.stage in (Stage.FAILED, Stage.DIED):
        sys.exit(1)
