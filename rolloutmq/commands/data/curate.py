"""`rolloutmq export FILE` and `rolloutmq import FILE`: copy groups out of a run and into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from buffer.curation.group_export import Exported
from buffer.errors import ConfigError
from buffer.model.ids import POOLS
from buffer.model.order_policy import load_order
from buffer.query.language import parse
from buffer.redis.signing import Key
from rolloutmq.commands.data.snapshot import progress
from rolloutmq.commands.look.groups import WHERE_HELP, read_where
from rolloutmq.console import console
from rolloutmq.options import AsJson, OneTask, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import emit, plural

EXPORT_EPILOG = """Example: rolloutmq export good.parquet --where '{"reward": {"$gte": 0.5}}'"""
IMPORT_EPILOG = "Example: rolloutmq import chosen.jsonl --task math"

_STATUSES = (*POOLS, "init", "failed")
_SHOWN = 20


def register(app: typer.Typer) -> None:
    app.command(name="export", epilog=EXPORT_EPILOG)(export)
    app.command(name="import", epilog=IMPORT_EPILOG)(import_groups)


def export(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="New file: NAME.jsonl or NAME.parquet.")
    ],
    task: OneTask = None,
    status: Annotated[
        str | None,
        typer.Option(
            help=f"Only groups of this status: {', '.join(_STATUSES)}. Default, "
            "without --where: completed."
        ),
    ] = None,
    where: Annotated[str | None, typer.Option(metavar="JSON", help=WHERE_HELP)] = None,
    archived: Annotated[
        bool,
        typer.Option(
            "--archived",
            help="All archived batches that are retained and have not been exported.",
        ),
    ] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Write groups to a file, one line per rollout.

    A line has messages, texts, token ids, logprobs, versions and rewards. With --archived, the
    batches that were trained are written; where retention waits for an export, they are freed once
    the file is on disk. A group that cannot be read is left out and reported. The file appears
    only when it is complete. Parquet needs the package pyarrow.
    """
    if status is not None and status not in _STATUSES:
        raise ConfigError(f"there is no status {status!r}", hint=f"one of {', '.join(_STATUSES)}")
    if archived and (task or status or where):
        raise ConfigError(
            "--archived exports whole batches", hint="remove --task, --status and --where"
        )
    query = parse(read_where(where))
    with open_target(redis_url, run_dir, run) as target, progress(as_json) as advance:
        if task is not None and task not in target.run.limits.tasks:
            raise ConfigError(
                f"there is no task {task!r}", hint=f"one of {', '.join(target.run.limits.tasks)}"
            )
        if archived:
            done = target.run.export_archived(file, advance=advance)
        else:
            done = target.run.export(file, task=task, status=status, where=query, advance=advance)
    if as_json:
        emit(_report(file, done, archived))
    else:
        _print(file, done, archived)


def _report(file: Path, done: Exported, archived: bool) -> dict[str, Any]:
    facts = {
        "file": str(file),
        "groups": done.groups,
        "rollouts": done.rollouts,
        "unreadable": done.unreadable,
    }
    return facts | (
        {"steps": [done.steps[0], done.steps[-1]] if done.steps else []} if archived else {}
    )


def _print(file: Path, done: Exported, archived: bool) -> None:
    if archived and not done.steps:
        console().print("No archived batch is left to export; no file was written.")
        return
    what = f"{plural(done.groups, 'group')} with {plural(done.rollouts, 'rollout')}"
    batches = f" of steps {done.steps[0]} to {done.steps[-1]}" if archived else ""
    console().print(f"{what}{batches} written to {file}")
    if done.unreadable:
        screen = console(stderr=True)
        screen.print(
            f"warning: {plural(len(done.unreadable), 'group')} left out, because unreadable:"
        )
        for gid, fault in list(done.unreadable.items())[:_SHOWN]:
            screen.print(f"  {gid}: {fault}", soft_wrap=True)


def import_groups(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File: NAME.jsonl or NAME.parquet.")],
    task: Annotated[
        str | None, typer.Option(help="Task that the groups join. Default: the task in each line.")
    ] = None,
    from_line: Annotated[int, typer.Option(min=1, help="First line to import.")] = 1,
    order: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="The run's order policy, if it is your own function.",
        ),
    ] = "",
    key_file: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="Key to sign the groups with: the producer's."),
    ] = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Put completed groups from a file into the pools of a run.

    All lines are checked before the first group is imported. Consecutive lines with the same gid
    are one group, which gets a new gid. The format is the one that export writes.
    """
    key = Key.read(key_file) if key_file else None
    with open_target(redis_url, run_dir, run) as target, progress(as_json) as advance:
        target.run.buffer.order_function = load_order(target.run.limits.order, order)
        if key:
            target.run.sign_with(key)
        done = target.run.import_groups(file, task=task, from_line=from_line, advance=advance)
    if as_json:
        emit(
            {
                "file": str(file),
                "groups": done.groups,
                "rollouts": done.rollouts,
                "too_old": done.too_old,
            }
        )
        return
    console().print(
        f"{plural(done.groups, 'group')} with {plural(done.rollouts, 'rollout')} "
        f"imported from {file}"
    )
    if done.too_old:
        console().print(
            f"[yellow]{done.too_old} of them are too old for the next train step: they "
            "will expire[/]"
        )
