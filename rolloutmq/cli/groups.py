"""`rolloutmq ls`, `dead`, `requeue` and `drop`: list groups, and move them by hand."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Annotated

import typer
from rich.text import Text

from buffer.errors import ConfigError
from buffer.groups.record_walk import RecordWalk
from buffer.ids import POOLS
from buffer.query.language import FIELDS, OPERATORS, parse
from buffer.query.record import STAGES, GroupRecord
from buffer.run import Run
from rolloutmq.command_list import command
from rolloutmq.options import (
    AsJson,
    GroupId,
    Limit,
    OneTask,
    RedisUrl,
    RunDir,
    RunName,
    Yes,
    open_target,
    read_where,
    require_known,
    require_yes,
)
from rolloutmq.output import age, console, count, emit, plain, plural, state, table, version_style
from rolloutmq.views.found_group import locate

_STATUSES = ("init", *POOLS, "failed")
WHERE_HELP = (
    f"Only groups that match this JSON query and the other options. Fields: {', '.join(FIELDS)} "
    "(time: ms since it was queued, claimed or submitted). Operators: $and, $or, "
    f"{', '.join(OPERATORS)}."
)


@command(
    "Look",
    "ls",
    epilog="""Example: rolloutmq ls --where '{"staleness": {"$gte": 2}}' --order=-tokens""",
)
def list_groups(
    task: OneTask = None,
    status: Annotated[
        str | None, typer.Option(help=f"Only this status: {', '.join(_STATUSES)}.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help=f"Only this stage: {', '.join(STAGES)}.")
    ] = None,
    where: Annotated[str | None, typer.Option(metavar="JSON", help=WHERE_HELP)] = None,
    order: Annotated[
        str, typer.Option(metavar="FIELD", help="Sort by this field; -FIELD: descending.")
    ] = "",
    limit: Limit = 50,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """List the groups of a run that match a query.

    They are listed by stage: waiting groups in their order, pools by weights and arrival. Archived,
    filtered and dropped groups have ended, and are only counted.
    """
    require_known("status", status, _STATUSES)
    require_known("stage", stage, STAGES)
    flags = {"task": task, "status": status, "stage": stage}
    query = parse(
        {
            "$and": [
                read_where(where),
                {name: value for name, value in flags.items() if value is not None},
            ]
        }
    )
    with open_target(redis_url, run_dir, run) as target:
        require_known("task", task, tuple(target.run.limits.tasks))
        rows = list(target.run.groups.find(query, limit=limit, order=order))
    if as_json:
        emit([asdict(row) for row in rows])
    elif rows:
        _show(rows, is_cut=len(rows) == limit)
    else:
        console().print(
            "No group matches. (Archived, filtered and dropped ones have ended: see "
            "rolloutmq status.)"
        )


def _show(rows: list[GroupRecord], *, is_cut: bool) -> None:
    screen = console()
    grid = table("gid", "stage", "status", "ver", "stale", "tries", "tokens", "reward", "owner",
                 right=["ver", "stale", "tries", "tokens", "reward"])  # fmt: skip
    for row in rows:
        style = "dim" if row.version is None else version_style(row.version)
        grid.add_row(
            row.gid,
            state(row.stage, width=7),
            row.status,
            Text("-" if row.version is None else str(row.version), style=style),
            "-" if row.staleness is None else str(row.staleness),
            str(row.tries),
            count(row.tokens),
            "-" if row.reward is None else f"{row.reward:.2f}",
            row.owner or row.batch or "",
        )
    screen.print(grid)
    if is_cut:
        screen.print(Text(f"only the first {len(rows)} are shown; --limit shows more", style="dim"))


@command("Steer", "dead", epilog="Example: rolloutmq dead --task math --limit 20")
def dead(
    task: OneTask = None,
    limit: Limit = 50,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, newest first.

    A group becomes a dead letter when its tries are used up, or when the trainer cannot read it.
    It is kept, with the reason, until it is requeued or dropped.
    """
    with open_target(redis_url, run_dir, run) as target:
        require_known("task", task, target.run.limits.tasks)
        fitting = (
            letter for letter in target.run.dead_letters.newest() if task in (None, letter.task)
        )
        letters = list(islice(fitting, limit))
    if as_json:
        emit([asdict(letter) for letter in letters])
        return
    screen = console()
    if not letters:
        screen.print("There are no dead letters.")
        return
    grid = table("gid", "tries", "worker", "age", "reason", right=["tries", "age"])
    for letter in letters:
        where = "" if letter.step is None else f"in batch {letter.step}: "
        grid.add_row(
            letter.gid,
            str(letter.tries),
            plain(letter.worker),
            age(letter.age_ms),
            plain(where + letter.reason),
        )
    screen.print(grid)
    if len(letters) == limit:
        screen.print(Text(f"only the newest {limit} are shown; --limit shows more", style="dim"))


@command("Steer", "requeue", epilog="Example: rolloutmq requeue math-0000000042 --yes")
def requeue(
    gid: Annotated[
        str | None, typer.Argument(metavar="[GID]", help="Id of a group: see rolloutmq dead.")
    ] = None,
    all_dead: Annotated[bool, typer.Option("--all-dead", help="Requeue all dead letters.")] = False,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Put a dead group, or one of a pool, back into the queue.

    It gets all its tries back and starts from its prompt: its result is discarded. Only an aborted
    group keeps its tokens.
    """
    if (gid is None) is not all_dead:
        raise ConfigError("pass either a GID or --all-dead")
    with open_target(redis_url, run_dir, run) as target:
        require_yes(yes, _plan(target.run, gid))
        gids = [gid] if gid else [letter.gid for letter in target.run.dead_letters.newest()]
        moved = {one: target.run.jobs.requeue(one) for one in gids}
    if as_json:
        emit({"requeued": moved})
    elif gid is None:
        console().print(f"{plural(len(moved), 'dead group')} requeued")
    else:
        console().print(f"{gid} was {moved[gid]}; it is requeued")


def _plan(run: Run, gid: str | None) -> str:
    if gid is None:
        return f"requeue {plural(len(run.dead_letters), 'dead group')}"
    return f"requeue {gid}, which is {locate(run, gid).where}"


@command("Steer", "drop", epilog="Example: rolloutmq drop math-0000000042 --yes")
def drop(
    gid: GroupId = "",
    task: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="End all groups of a task that the run's config lacks now."
        ),
    ] = "",
    revoke: Annotated[
        str,
        typer.Option(
            metavar="WORKER", help="Worker that runs the group: its lease is revoked, too."
        ),
    ] = "",
    yes: Yes = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """End a group that waits, is in a pool, or is dead.

    It is counted as dropped, its payload is freed, and its prompt is not drawn again. A running
    group is refused unless its worker is named with --revoke; one in a batch is always refused.
    """
    if bool(gid) == bool(task):
        raise ConfigError("drop needs a group or a task", hint="give either GID or --task NAME")
    if task:
        with open_target(redis_url, run_dir, run) as target:
            _drop_task(target.run, task, yes=yes, as_json=as_json)
        return
    with open_target(redis_url, run_dir, run) as target:
        where = locate(target.run, gid).where
        require_yes(yes, f"end {gid}, which is {where}")
        before = target.run.jobs.drop(gid, revoke=revoke)
    if as_json:
        emit({"gid": gid, "before": before})
    elif before == "dropped":
        console().print(f"{gid} had been dropped before; nothing was changed")
    else:
        console().print(f"{gid} was {before}; it is dropped")


def _drop_task(run: Run, task: str, *, yes: bool, as_json: bool) -> None:
    """Drop the groups of a removed task. Raises ConfigError if the config still has the task."""
    if task not in run.limits.tasks or not run.limits.tasks[task].is_gone:
        gone = [name for name, limits in run.limits.tasks.items() if limits.is_gone]
        raise ConfigError(
            f"task {task!r} is not one that the run's config lacks",
            hint=f"those are: {', '.join(gone) or 'none'}; `rolloutmq drop GID` ends one group",
        )
    stages = [
        (gid, record["stage"]) for gid, record in RecordWalk(run.store, run.keys).records(task)
    ]
    free = [gid for gid, stage in stages if stage not in ("running", "taken")]
    held = len(stages) - len(free)
    require_yes(yes, f"end {plural(len(free), 'group')} of task {task}")
    for gid in free:
        run.jobs.drop(gid)
    if as_json:
        emit({"task": task, "dropped": len(free), "held": held})
    else:
        left = f"; {held} running or in a batch are left" if held else ""
        console().print(f"{plural(len(free), 'group')} of task {task} dropped{left}")
