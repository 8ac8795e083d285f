"""`rolloutmq export FILE` and `rolloutmq import FILE`: groups out of a run, for data curators, and into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buffer.commands.save import progress
from buffer.commands.screen import console, emit, plural
from buffer.commands.target import AsJson, RedisUrl, RunDir, RunName, open_target
from buffer.errors import ConfigError
from buffer.keys import POOLS
from buffer.order import load_order

EXPORT_EPILOG = "Example: rolloutmq export good.parquet --task math"
IMPORT_EPILOG = "Example: rolloutmq import chosen.jsonl --task math"

_STATUSES = (*POOLS, "init", "failed")


def register(app: typer.Typer) -> None:
    app.command(name="export", epilog=EXPORT_EPILOG)(export)
    app.command(name="import", epilog=IMPORT_EPILOG)(import_groups)


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file: NAME.jsonl or NAME.parquet.")],
    task: Annotated[str | None, typer.Option(help="Only groups of this task.")] = None,
    status: Annotated[str, typer.Option(help=f"Groups of this status: {', '.join(_STATUSES)}.")] = "completed",
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Write groups to a file, one line per rollout.

    Those in pools and in batches that are not freed yet; with messages, texts, token ids, logprobs, versions and
    rewards. The file appears when it is whole. Parquet needs the package pyarrow.
    """
    if status not in _STATUSES:
        raise ConfigError(f"there is no status {status!r}", hint=f"one of {', '.join(_STATUSES)}")
    with open_target(redis_url, run_dir, run) as target, progress(as_json) as advance:
        if task is not None and task not in target.run.limits.tasks:
            raise ConfigError(f"there is no task {task!r}", hint=f"one of {', '.join(target.run.limits.tasks)}")
        done = target.run.export(file, task=task, status=status, advance=advance)
    if as_json:
        emit({"file": str(file), "groups": done.groups, "rollouts": done.rollouts})
    else:
        console().print(f"{plural(done.groups, 'group')} with {plural(done.rollouts, 'rollout')} written to {file}")


def import_groups(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File: NAME.jsonl or NAME.parquet.")],
    task: Annotated[str | None, typer.Option(help="Task of the run. Default: the one that each line names.")] = None,
    from_line: Annotated[int, typer.Option(min=1, help="Begin with this line.")] = 1,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Put completed groups of a file into the pools of a run.

    All lines are checked before the first group is imported. Lines that follow each other with the same gid are a
    group; it gets a gid of its own. What a line may hold is what export writes.
    """
    with open_target(redis_url, run_dir, run) as target, progress(as_json) as advance:
        target.run.buffer.order_function = load_order(target.run.limits.order)
        done = target.run.import_groups(file, task=task, from_line=from_line, advance=advance)
    if as_json:
        emit({"file": str(file), "groups": done.groups, "rollouts": done.rollouts})
    else:
        console().print(f"{plural(done.groups, 'group')} with {plural(done.rollouts, 'rollout')} imported from {file}")
