"""`rolloutmq workers`: who generates, and in what state.

`rolloutmq fence WORKER`: revoke all that a worker holds, so that others generate it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from buffer.control.fleet import WorkerRecord
from buffer.errors import ConfigError
from buffer.monitoring.console import console, plain
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import age, count, emit, plural, state, table, worker_state

WORKERS_EPILOG = "Example: rolloutmq workers --json | jq '.[].tokens_per_s'"


def register(app: typer.Typer) -> None:
    app.command(epilog=WORKERS_EPILOG)(workers)
    app.command(epilog=FENCE_EPILOG)(fence)


def workers(
    redis_url: RedisUrl = None, run_dir: RunDir = None, run: RunName = None, as_json: AsJson = False
) -> None:
    """List the workers of a run.

    With engine, state, weights, time since the last heartbeat, groups held and how many it would
    hold, requests in the engine (load), tokens per second, groups done, groups that
    failed or that a trainer could not use (bad). One that is barred claims nothing more until
    `rolloutmq continue --worker ID`. Then how many of the groups only wait for their judge
    (judging), how long the judges take, and how often these failed.
    """
    with open_target(redis_url, run_dir, run) as target:
        rows = target.run.fleet.workers()
        lease_ms = target.run.limits.lease_ms
        weights = str(target.run.control.state().weights)
    if as_json:
        emit([_as_json(row, lease_ms) for row in rows])
    elif not rows:
        console().print("No worker has joined. Start one with: rolloutmq worker CONFIG")
    else:
        console().print(workers_table(rows, lease_ms, weights))
        if judged := [row for row in rows if row.judged or row.judging]:
            console().print(judges_table(judged))


def workers_table(rows: list[WorkerRecord], lease_ms: int, newest: str) -> Table:
    """One row per worker; weights that are not the newest are marked."""
    numbers = ["seen", "holds", "load", "tok/s", "done", "bad"]
    grid = table("worker", "engine", "state", "weights", *numbers, right=numbers)
    for row in rows:
        is_live = row.is_live(lease_ms)
        grid.add_row(
            plain(row.id),
            plain(row.engine),
            state(worker_state(row, is_live)),
            Text(plain(row.weights) or "-", style="" if row.weights == newest else "yellow"),
            Text(age(row.silent_ms), style="" if is_live else "red"),
            f"{row.holds}/{row.concurrency}" if row.concurrency else str(row.holds),
            "-" if row.requests is None else str(row.requests),
            count(row.tokens_per_s),
            str(row.done),
            _bad(row),
        )
    return grid


def judges_table(rows: list[WorkerRecord]) -> Table:
    """How many groups wait for judges now, how many answers came and failed, and how long they
    took.
    """
    numbers = ["judging", "judged", "failed", "median", "99 of 100 within"]
    grid = table("worker", *numbers, right=numbers)
    for row in rows:
        failed = Text(str(row.judge_failures), style="red" if row.judge_failures else "dim")
        times = (age(1000 * row.judge_times.quantile_s(share)) for share in (0.5, 0.99))
        grid.add_row(plain(row.id), str(row.judging), str(row.judged), failed, *times)
    return grid


def _bad(row: WorkerRecord) -> Text:
    """Groups that failed in its hands, and those that a trainer could not use."""
    bad = row.failed + row.quarantined
    return Text(str(bad), style="red" if bad else "dim")


def _as_json(row: WorkerRecord, lease_ms: int) -> dict[str, Any]:
    """Return what is known of a worker; what it registered of itself comes under the names it
    chose.
    """
    known = {
        name: value for name, value in asdict(row).items() if name != "facts" and value is not None
    }
    times = row.judge_times
    judges = {
        "judge_s": row.judging_ms / 1000 / row.judged if row.judged else None,
        "judge_p50_s": times.quantile_s(0.5),
        "judge_p99_s": times.quantile_s(0.99),
    }
    return {**row.facts, **known, **judges, "alive": row.is_live(lease_ms)}


FENCE_EPILOG = "Example: rolloutmq fence host7-1 --yes"


def fence(
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="Id of the worker: see rolloutmq workers.")
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it, and not only say what would be done.")
    ] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Revoke all that a worker holds, and forget it.

    Its groups wait again; what it still submits of them is refused. A worker that lives notices at
    its next heartbeat, drops its work, and joins again.
    """
    with open_target(redis_url, run_dir, run) as target:
        known = {row.id: row for row in target.run.fleet.workers()}
        if worker not in known:
            raise ConfigError(
                f"there is no worker {worker!r}",
                hint=f"known: {', '.join(sorted(known)) or 'none'}",
            )
        if not yes:
            held = plural(known[worker].holds, "group")
            seen = age(known[worker].silent_ms)
            raise ConfigError(
                f"this would revoke {held} of {worker}, last seen {seen} ago; nothing was changed",
                hint="say --yes to do it",
            )
        revoked = target.run.fleet.fence(worker)
    if as_json:
        emit({"worker": worker, "revoked": revoked})
    else:
        console().print(f"{worker} is fenced; {plural(revoked, 'group')} taken from it")
