"""`rolloutmq workers` and `fence`: list the workers of a run, and revoke what one holds."""

from __future__ import annotations

from typing import Annotated

from rich.console import RenderableType
from rich.table import Table
from typer import Argument

from buffer.control.worker_record import NUMBERS, WorkerRecord
from rolloutmq.command_list import command
from rolloutmq.options import Output, Target, Yes, on_run, require_known, require_yes
from rolloutmq.output import age, known, plural, table
from rolloutmq.views.run_json import worker_json
from rolloutmq.views.run_view import read_run_view
from rolloutmq.views.screen import workers_table


@command("workers", epilog="Example: rolloutmq workers --json | jq '.[].tokens_per_s'")
@on_run
def workers(target: Target) -> Output:
    """List the workers of a run; of one that is over, those that have left.

    Columns: state, weights, time since the last heartbeat (seen), groups held of its
    capacity (holds), requests in the engine (load), tokens per second, groups done, and groups that
    failed or that the trainer could not use (bad). A barred worker claims nothing until
    `rolloutmq resume --worker ID`. A second table has the groups that only wait for their judge,
    the times of judges, and their failures.
    """
    view = read_run_view(target.run)
    rows = view.workers or view.ended_workers
    shown: list[RenderableType] = [
        "No worker has registered. `rolloutmq worker CONFIG` starts one."
    ]
    if rows:
        shown = [workers_table(rows, view.lease_ms, str(view.weights))]
    if judged := [row for row in rows if row.judged or row.judging]:
        shown.append(judges_table(judged))
    shown += [
        f"{row.id}: {of.note.format(number)}"
        for row in rows
        for name, of in NUMBERS.items()
        if of.note and (number := getattr(row, name))
    ]
    return Output([worker_json(row, view) for row in rows], shown)


def judges_table(rows: list[WorkerRecord]) -> Table:
    reported = {name: row.heading for name, row in NUMBERS.items() if row.table == "judges"}
    numbers = [*reported.values(), "median", "99th percentile"]
    grid = table("worker", *numbers, right=numbers)
    for row in rows:
        times = (age(1000 * row.judge_times.quantile_s(share)) for share in (0.5, 0.99))
        grid.add_row(row.id, *(known(getattr(row, name), ",.0f") for name in reported), *times)
    return grid


@command("fence", epilog="Example: rolloutmq fence host7-1 --yes")
@on_run
def fence(
    target: Target,
    worker: Annotated[
        str, Argument(metavar="WORKER", help="Id of the worker; `rolloutmq workers` lists them.")
    ],
    yes: Yes = False,
) -> Output:
    """Revoke all groups that a worker holds, and remove the worker.

    Its groups are queued again; if it still submits them, they are refused. A worker that is alive
    notices at its next heartbeat, drops its groups, and registers again.
    """
    records = {row.id: row for row in target.run.fleet.workers()}
    require_known("worker", worker, sorted(records))
    held = plural(records[worker].holds, "group")
    seen = age(records[worker].silent_ms)
    require_yes(yes, f"revoke {held} of {worker}, last seen {seen} ago")
    revoked = target.run.fleet.fence(worker)
    said = f"{worker} is fenced; {plural(revoked, 'group')} revoked"
    return Output({"worker": worker, "revoked": revoked}, said)
