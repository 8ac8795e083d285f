"""`rolloutmq workers` and `fence`: list the workers of a run, and revoke what one holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, get_args

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from buffer.control.worker_record import WorkerRecord
from buffer.ledger.audits import AuditAccount, Verdict
from buffer.run import Run
from consumer.grpo.audit.audit_log import groups_of
from rolloutmq.command_list import command
from rolloutmq.options import Answer, Target, Yes, on_run, require_known, require_yes
from rolloutmq.output import age, count, known, plural, state, table, worker_state

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@command("Look", "workers", epilog="Example: rolloutmq workers --json | jq '.[].tokens_per_s'")
@on_run
def workers(
    target: Target,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="WORKER",
            help="List the groups that this worker made: those that have a record, and, from "
            "`audit.jsonl` in the run's folder, those that were trained.",
        ),
    ] = None,
) -> Answer:
    """List the workers of a run.

    Columns: engine, state, weights, time since the last heartbeat (seen), groups held of its
    capacity (holds), requests in the engine (load), tokens per second, groups done, and groups that
    failed or that the trainer could not use (bad). A barred worker claims nothing until
    `rolloutmq resume --worker ID`. A second table has the groups that only wait for their judge,
    the times of judges, and their failures. A third one has the numbers of audited groups.
    """
    if groups is not None:
        made = _groups_of(target, groups)
        return Answer(made, _groups_table(made) if made else f"No group of {groups} is known.")
    run = target.run
    rows = run.fleet.workers()
    shown = _shown(rows, run) if rows else [_NO_WORKER]
    return Answer([_as_json(row, run.limits.lease_ms) for row in rows], shown)


_NO_WORKER = "No worker has registered. `rolloutmq worker CONFIG` starts one."


def _shown(rows: list[WorkerRecord], run: Run) -> list[RenderableType]:
    audits = run.audits.read()
    judged = [row for row in rows if row.judged or row.judging]
    return [
        workers_table(rows, run.limits.lease_ms, str(run.control.state().weights)),
        *([judges_table(judged)] if judged else []),
        *([audits_table(audits)] if audits.groups else []),
        *(
            f"{row.id}: {row.replaced} processes of your functions hung, crashed or ran out of "
            "memory, and were replaced; its log names them"
            for row in rows
            if row.replaced
        ),
    ]


def workers_table(rows: list[WorkerRecord], lease_ms: int, newest: str) -> Table:
    numbers = ["seen", "holds", "load", "tok/s", "done", "bad"]
    grid = table("worker", "engine", "state", "weights", *numbers, right=numbers)
    for row in rows:
        is_live = row.is_live(lease_ms)
        grid.add_row(
            row.id,
            row.engine,
            state(worker_state(row, is_live)),
            Text(row.weights or "-", style="" if row.weights == newest else "yellow"),
            Text(age(row.silent_ms), style="" if is_live else "red"),
            f"{row.holds}/{row.concurrency}" if row.concurrency else str(row.holds),
            known(row.requests),
            count(row.tokens_per_s),
            str(row.done),
            _number(row.failed + row.quarantined),
        )
    return grid


def judges_table(rows: list[WorkerRecord]) -> Table:
    numbers = ["judging", "judged", "failed", "median", "99th percentile"]
    grid = table("worker", *numbers, right=numbers)
    for row in rows:
        failed = _number(row.judge_failures)
        times = (age(1000 * row.judge_times.quantile_s(share)) for share in (0.5, 0.99))
        grid.add_row(row.id, str(row.judging), str(row.judged), failed, *times)
    return grid


def audits_table(audits: AuditAccount) -> Table:
    verdicts = ["agree", "differ", "impossible"]
    grid = table("audits of", *verdicts, "failed", right=verdicts)
    for worker, groups in sorted(audits.groups.items()):
        counts = (str(groups.get(verdict, 0)) for verdict in VERDICTS)
        grid.add_row(worker or "(unknown)", *counts, audits.failed.get(worker, ""))
    if audits.missed:
        grid.caption = f"{audits.missed} batches were freed before they were audited"
    return grid


def _groups_of(target: Target, worker: str) -> list[dict[str, Any]]:
    """Return the groups of a worker: those of audited batches by step, then the others."""
    living = {row.gid: row for row in target.run.groups.find({"owner": worker})}
    logged = list(groups_of(target.run_dir, worker)) if target.run_dir else []
    batches = [
        {
            "gid": made.gid,
            "stage": living[made.gid].stage if made.gid in living else "trained",
            "step": made.step,
            "weights": made.weights,
        }
        for made in logged
    ]
    others = [row for row in living.values() if row.gid not in {made.gid for made in logged}]
    return batches + [
        {"gid": row.gid, "stage": row.stage, "step": None, "weights": f"…:{row.version}"}
        for row in others
    ]


def _groups_table(rows: list[dict[str, Any]]) -> Table:
    grid = table("gid", "stage", "step", "weights", right=["step"])
    for row in rows:
        grid.add_row(row["gid"], state(row["stage"], width=7), known(row["step"]), row["weights"])
    return grid


def _number(faults: int) -> Text:
    return Text(str(faults), style="red" if faults else "dim")


def _as_json(row: WorkerRecord, lease_ms: int) -> dict[str, Any]:
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


@command("Steer", "fence", epilog="Example: rolloutmq fence host7-1 --yes")
@on_run
def fence(
    target: Target,
    worker: Annotated[
        str,
        typer.Argument(metavar="WORKER", help="Id of the worker; `rolloutmq workers` lists them."),
    ],
    yes: Yes = False,
) -> Answer:
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
    return Answer({"worker": worker, "revoked": revoked}, said)
