"""`rolloutmq ls`: the groups of a run that still live, by task, status, stage, or any question
(`buffer.query`).

`rolloutmq dead`: the groups that nobody tries any more, and why.

`rolloutmq requeue GID`, `--all-dead`: let groups wait again, with all their tries.

`rolloutmq drop GID`: end a group by hand.

Where one group is, in words: what commands say before they move it.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any

import orjson
import typer
from rich.text import Text

from buffer.errors import ConfigError, QueryError
from buffer.model.ids import POOLS, split_group_id
from buffer.monitoring.console import console, plain
from buffer.query.language import FIELDS, OPERATORS, parse
from buffer.query.record import STAGES, GroupRecord
from buffer.run import Run
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import age, count, emit, plural, state, table, version_style

LS_EPILOG = """Example: rolloutmq ls --where '{"status": "completed", "staleness": {"$gte": 2}}' --order=-tokens"""

_STATUSES = ("init", *POOLS, "failed")
WHERE_HELP = (
    f"Only groups that fit this JSON, and the other options. Fields: {', '.join(FIELDS)} (time: ms since a group began "
    f"to wait, was claimed or handed in). Operators: $and, $or, {', '.join(OPERATORS)}."
)


def register(app: typer.Typer) -> None:
    app.command(name="ls", epilog=LS_EPILOG)(list_groups)
    app.command(epilog=DEAD_EPILOG)(dead)
    app.command(epilog=REQUEUE_EPILOG)(requeue)
    app.command(epilog=DROP_EPILOG)(drop)


def list_groups(
    task: Annotated[str | None, typer.Option(help="Only groups of this task.")] = None,
    status: Annotated[
        str | None, typer.Option(help=f"Only this status: {', '.join(_STATUSES)}.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help=f"Only this stage: {', '.join(STAGES)}.")
    ] = None,
    where: Annotated[str | None, typer.Option(metavar="JSON", help=WHERE_HELP)] = None,
    order: Annotated[
        str, typer.Option(metavar="FIELD", help="Sort by this field; -FIELD: highest first.")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """List groups, stage by stage: waiting ones in their order, a pool by weights and arrival.

    Finds them through the run's indexes. Archived, filtered and dropped groups have ended and are
    only counted.
    """
    _check("status", status, _STATUSES)
    _check("stage", stage, STAGES)
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
        _check("task", task, tuple(target.run.limits.tasks))
        rows = list(target.run.groups.find(query, limit=limit, order=order))
    if as_json:
        emit([asdict(row) for row in rows])
    elif rows:
        _show(rows, is_cut=len(rows) == limit)
    else:
        console().print(
            "No such group. (Archived, filtered and dropped ones have ended: see rolloutmq status.)"
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
        screen.print(Text(f"the first {len(rows)}; more with --limit", style="dim"))


def read_where(text: str | None) -> Any:
    if text is None:
        return {}
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        hint = """quote all of it for the shell, as in --where '{"status": "completed"}'"""
        raise QueryError(f"--where is no JSON: {error}", hint=hint) from error


def _check(option: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"there is no {option} {value!r}", hint=f"one of {', '.join(known)}")


DEAD_EPILOG = "Example: rolloutmq dead --task math --limit 20"


def dead(
    task: Annotated[str | None, typer.Option(help="Only groups of this task.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, the newest first.

    A group dies when its tries are used up, or when a trainer cannot read it. It is kept, with the
    reason, until it is requeued or dropped.
    """
    with open_target(redis_url, run_dir, run) as target:
        known = target.run.limits.tasks
        if task is not None and task not in known:
            raise ConfigError(f"there is no task {task!r}", hint=f"one of {', '.join(known)}")
        fitting = (
            letter for letter in target.run.dead_letters.newest() if task in (None, letter.task)
        )
        letters = list(islice(fitting, limit))
    if as_json:
        emit([asdict(letter) for letter in letters])
        return
    screen = console()
    if not letters:
        screen.print("No dead letter.")
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
        screen.print(Text(f"the newest {limit}; more with --limit", style="dim"))


def describe_place(run: Run, gid: str) -> str:
    """For example "running on host7-1" or "completed, made by weights 12". ConfigError where there
    is no such group.
    """
    task, draw = split_group_id(gid)
    if task not in run.limits.tasks:
        raise ConfigError(
            f"run {run.name!r} has no task {task!r}",
            hint=f"its tasks: {', '.join(run.limits.tasks)}",
        )
    record = run.record(gid)
    match record.get("stage"):
        case None:
            places = run.account.places(task, draw)
            if not places:
                raise ConfigError(f"{gid} was never started", hint="see rolloutmq ls")
            return places[0]
        case "running":
            return f"running on {record['owner']}"
        case "taken":
            return f"in batch {record['batch']}"
        case "pool":
            made_by = f", made by weights {record['version']}" if record.get("version") else ""
            return record["status"] + made_by
        case "dead":
            return f"dead: {run.dead_letters.reason(gid)['reason']}"
        case stage:
            return str(stage)


REQUEUE_EPILOG = "Example: rolloutmq requeue math-0000000042 --yes"


def requeue(
    gid: Annotated[
        str | None, typer.Argument(metavar="[GID]", help="Id of a group: see rolloutmq dead.")
    ] = None,
    all_dead: Annotated[bool, typer.Option("--all-dead", help="All dead letters.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it, and not only say what would be done.")
    ] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Let a dead group wait again, or one of a pool.

    It gets all its tries back and starts from its prompt: a result it had is thrown away. Only an
    aborted group keeps its tokens.
    """
    if (gid is None) is not all_dead:
        raise ConfigError("one thing to requeue is needed: a GID, or --all-dead")
    with open_target(redis_url, run_dir, run) as target:
        plan = _plan(target.run, gid)
        if not yes:
            raise ConfigError(f"{plan}; nothing was changed", hint="say --yes to do it")
        gids = [gid] if gid else [letter.gid for letter in target.run.dead_letters.newest()]
        moved = {one: target.run.jobs.requeue(one) for one in gids}
    if as_json:
        emit({"requeued": moved})
    elif gid is None:
        console().print(f"{plural(len(moved), 'dead group')} wait again")
    else:
        console().print(f"{gid} was {moved[gid]}; it waits")


def _plan(run: Run, gid: str | None) -> str:
    if gid is None:
        return f"this would let {plural(len(run.dead_letters), 'dead group')} wait again"
    return f"this would let {gid} wait again, which is {describe_place(run, gid)}"


DROP_EPILOG = "Example: rolloutmq drop math-0000000042 --yes"


def drop(
    gid: Annotated[
        str, typer.Argument(metavar="GID", help="Id of a group, for example math-0000000042.")
    ],
    revoke: Annotated[
        str,
        typer.Option(
            metavar="WORKER", help="The worker that runs it: its lease ends in the same step."
        ),
    ] = "",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it, and not only say what would be done.")
    ] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """End a group that waits, is in a pool, or is dead.

    It is counted as dropped, its bytes are freed, and its prompt is not drawn again. A group that
    runs is refused unless its worker is named; one in a batch always is.
    """
    with open_target(redis_url, run_dir, run) as target:
        where = describe_place(target.run, gid)
        if not yes:
            raise ConfigError(
                f"this would end {gid}, which is {where}; nothing was changed",
                hint="say --yes to do it",
            )
        before = target.run.jobs.drop(gid, revoke=revoke)
    if as_json:
        emit({"gid": gid, "before": before})
    elif before == "dropped":
        console().print(f"{gid} was dropped before; nothing was to do")
    else:
        console().print(f"{gid} was {before}; it is dropped")
