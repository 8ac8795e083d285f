"""`rolloutmq status`, `workers` and `fence`: the state of a run and of its workers."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from buffer.control.worker_record import NUMBERS, WorkerRecord
from buffer.errors import StoreUnavailable
from consumer.handle.step_log import read_steps
from rolloutmq.command_list import command
from rolloutmq.options import (
    AsJson,
    Output,
    Target,
    Yes,
    on_run,
    or_folder,
    require_known,
    require_yes,
)
from rolloutmq.output import age, console, emit_line, facts, known, plural, table
from rolloutmq.views.explain.diagnosis import diagnose
from rolloutmq.views.explain.learning import learning
from rolloutmq.views.explain.processes import with_processes
from rolloutmq.views.explain.who_waited import read_waits
from rolloutmq.views.history import History
from rolloutmq.views.run_folder import RunFolder
from rolloutmq.views.run_json import describe, worker_json
from rolloutmq.views.run_view import read_run_view
from rolloutmq.views.screen import LINE_S, LiveNotes, status_screen, watch, workers_table


def _folder_status(folder: Path, error: StoreUnavailable, **_: object) -> Output:
    read = RunFolder(folder)
    why = Text(f"the server of this run cannot be read: {error.message}", style="yellow")
    title = Text(f"run {read.name}, from its folder", style="bold")
    known = read.facts()
    found = [asdict(symptom) for symptom in read.findings]
    document = {"run": read.name, "phase": "no server", "folder": known, "error": error.message}
    shown = [title, why, facts([*known.items()]), *(each.text() for each in read.findings)]
    return Output(document | {"findings": found}, shown)


@command("status", epilog="Example: rolloutmq status --json | python -m json.tool")
@or_folder(_folder_status)
def status(
    target: Target,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Show it again and again, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float | None, Option(min=0.1, help="With --follow: seconds between two refreshes.")
    ] = None,
    refreshes: Annotated[
        int | None,
        Option("--count", min=1, metavar="N", help="With --follow: exit after N refreshes."),
    ] = None,
    as_json: AsJson = False,
) -> Output | None:
    """Show the state of a run: groups, weights, workers, staleness.

    Also shows whether it is paused, by whom and since when, and whether every group is accounted
    for. It ends with what the run waits for, as `rolloutmq doctor` has it, and with who waited for
    whom in the last steps. With --follow, it adds curves, events and workers; if the output is not
    a terminal, it prints one line every few seconds. Of a run whose server is lost, it shows what
    the run's folder has.
    """
    if follow:
        _follow(target, refreshes, every, as_json=as_json)
        return None
    view = read_run_view(target.run)
    steps = read_steps(target.run_dir)
    waits = read_waits(target.run, view, steps)
    found = [*diagnose(view), *learning(target.run_dir, steps or view.last_trained)]
    found = with_processes(view, found, target.run_dir)
    shown = [status_screen(view), *(symptom.text() for symptom in found)]
    shown += [Text(f"\n{waits}")] if waits else []
    findings = [asdict(symptom) for symptom in found]
    document = {"waits": waits and waits.shares, "findings": findings}
    return Output(describe(view) | document, shown)


def _follow(target: Target, refreshes: int | None, every_s: float | None, *, as_json: bool) -> None:
    left = iter(range(refreshes - 1, -1, -1)) if refreshes else None

    def is_over() -> bool:
        return left is not None and next(left) == 0

    if not as_json:
        history = History(target.run_dir)
        watch(target.run, history, LiveNotes(), console(), is_over, every_s=every_s)
        return
    while True:
        emit_line(describe(read_run_view(target.run)))
        if is_over():
            return
        time.sleep(every_s or LINE_S)


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
