"""`rolloutmq ls`: list the groups of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import orjson
import typer
from rich.text import Text

from buffer.errors import ConfigError, QueryError
from buffer.model.ids import POOLS
from buffer.query.language import FIELDS, OPERATORS, parse
from buffer.query.record import STAGES, GroupRecord
from rolloutmq.console import console
from rolloutmq.options import AsJson, Limit, OneTask, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import count, emit, state, table, version_style

LS_EPILOG = """Example: rolloutmq ls --where '{"staleness": {"$gte": 2}}' --order=-tokens"""

_STATUSES = ("init", *POOLS, "failed")
WHERE_HELP = (
    f"Only groups that match this JSON query and the other options. Fields: {', '.join(FIELDS)} "
    "(time: ms since it was queued, claimed or submitted). Operators: $and, $or, "
    f"{', '.join(OPERATORS)}."
)


def register(app: typer.Typer) -> None:
    app.command(name="ls", epilog=LS_EPILOG)(list_groups)


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


def read_where(text: str | None) -> Any:
    """Parse the value of --where. Raises QueryError."""
    if text is None:
        return {}
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        hint = """quote it for the shell, for example --where '{"status": "completed"}'"""
        raise QueryError(f"--where is not valid JSON: {error}", hint=hint) from error


def _check(option: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"there is no {option} {value!r}", hint=f"one of {', '.join(known)}")
