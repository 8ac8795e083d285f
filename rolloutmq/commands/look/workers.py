"""`rolloutmq workers`: list the workers of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from buffer.control.worker_record import WorkerRecord
from buffer.monitoring.console import console, plain
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import age, count, emit, state, table, worker_state

WORKERS_EPILOG = "Example: rolloutmq workers --json | jq '.[].tokens_per_s'"


def register(app: typer.Typer) -> None:
    app.command(epilog=WORKERS_EPILOG)(workers)


def workers(
    redis_url: RedisUrl = None, run_dir: RunDir = None, run: RunName = None, as_json: AsJson = False
) -> None:
    """List the workers of a run.

    Columns: engine, state, weights, time since the last heartbeat (seen), groups held of its
    capacity (holds), requests in the engine (load), tokens per second, groups done, and groups that
    failed or that the trainer could not use (bad). A barred worker claims nothing until
    `rolloutmq resume --worker ID`. A second table has the groups that only wait for their judge,
    the times of judges, and their failures.
    """
    with open_target(redis_url, run_dir, run) as target:
        rows = target.run.fleet.workers()
        lease_ms = target.run.limits.lease_ms
        weights = str(target.run.control.state().weights)
    if as_json:
        emit([_as_json(row, lease_ms) for row in rows])
    elif not rows:
        console().print("No worker has registered. `rolloutmq worker CONFIG` starts one.")
    else:
        console().print(workers_table(rows, lease_ms, weights))
        if judged := [row for row in rows if row.judged or row.judging]:
            console().print(judges_table(judged))


def workers_table(rows: list[WorkerRecord], lease_ms: int, newest: str) -> Table:
    """Return a row per worker; weights that are not the newest are marked."""
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
    """Return how many groups wait for judges, how many were judged or failed, and the times."""
    numbers = ["judging", "judged", "failed", "median", "99th percentile"]
    grid = table("worker", *numbers, right=numbers)
    for row in rows:
        failed = Text(str(row.judge_failures), style="red" if row.judge_failures else "dim")
        times = (age(1000 * row.judge_times.quantile_s(share)) for share in (0.5, 0.99))
        grid.add_row(plain(row.id), str(row.judging), str(row.judged), failed, *times)
    return grid


def _bad(row: WorkerRecord) -> Text:
    """Return the number of groups that failed on a worker, or that the trainer could not use."""
    bad = row.failed + row.quarantined
    return Text(str(bad), style="red" if bad else "dim")


def _as_json(row: WorkerRecord, lease_ms: int) -> dict[str, Any]:
    """Return all that is known of a worker, with the facts that it registered under their names."""
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
