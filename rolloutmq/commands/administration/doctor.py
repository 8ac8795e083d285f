"""`rolloutmq doctor`: check the server, and report what each run waits for.

Beside the snapshot of a run it inspects the judge queue, the weights' folder and the newest dead
letter. Each of these may be inaccessible (a user without the right, a folder of another machine),
and is then left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import typer
from redis.exceptions import ResponseError
from rich.console import Console
from rich.text import Text

from buffer.errors import (
    RunError,
    SchemaVersionError,
    StoreError,
    StoreUnavailable,
    StoreUnsafe,
    WireError,
)
from buffer.redis.server.check import Finding, check_all
from buffer.redis.store import Store
from buffer.run import Run
from buffer.weights import folder_manifest as weights_manifest
from rolloutmq.commands.administration.diagnosis import (
    Symptom,
    describe,
    diagnose,
    last_event_ms,
    worst_first,
)
from rolloutmq.console import console
from rolloutmq.options import (
    Address,
    AsJson,
    RedisUrl,
    RunDir,
    RunName,
    choose_run,
    open_server,
)
from rolloutmq.output import age, emit, plural
from rolloutmq.views.run_view import RunView, read_run_view


def inspect(run: Run, snap: RunView) -> list[Symptom]:
    """Return the symptoms of a run that are not visible in its snapshot."""
    return [*_damage(run, snap), *_judges(run), *_weights(snap), *_newest_letter(run, snap)]


def _damage(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report what `fsck` finds: all of it in a small run, and in a large one what costs little."""
    groups = sum(task.account.total for task in snap.tasks)
    databases: Any = run.store.control.info("keyspace")  # DBSIZE is for administrators
    keys = sum(database["keys"] for database in databases.values())
    is_small = max(groups, keys) <= FEW
    found = run.account.fsck().damage if is_small else run.account.spot_check()
    texts = [each.text for each in found if each.text not in snap.faults]
    for text in texts[:SHOWN]:
        yield Symptom("fault", text, None, "`rolloutmq fsck` lists all that is wrong")
    if len(texts) > SHOWN:
        more = f"{len(texts) - SHOWN} more faults"
        yield Symptom("fault", more, None, "`rolloutmq fsck` lists all that is wrong")
    if not is_small:
        what = f"{groups} groups: only the ledger and the newest of them were checked"
        yield Symptom("note", what, None, "`rolloutmq fsck` checks them all")


def _judges(run: Run) -> Iterator[Symptom]:
    """Report rollouts that wait for judges while none is alive.

    These are rq's own keys. They are on the run's server, unless [judges] redis_url names another.
    """
    queue = run.keys.judge_queue
    raw = run.store.control
    try:
        waiting = raw.llen(f"rq:queue:{queue}")
        # a judge that was killed stays in the set, but its own key expires
        alive = sum(raw.exists(worker) for worker in raw.smembers(f"rq:workers:{queue}"))
    except ResponseError:  # a user who may not read them, or a cluster, where they have other nodes
        return
    if waiting and not alive:
        what = f"{plural(waiting, 'rollout')} waiting to be judged, and no judge is alive"
        yield Symptom("stuck", what, None, "`rolloutmq judge CONFIG`")


def _weights(snap: RunView) -> Iterator[Symptom]:
    """Report a weights folder whose files are not those that were published.

    A folder that this machine cannot see is checked by the workers.
    """
    folder = Path(snap.control.get("weights_path", ""))
    checksum = snap.control.get("weights_checksum", "")
    if not checksum or not folder.is_dir():
        return
    try:
        weights_manifest.check_sizes(folder, checksum)
    except (OSError, WireError) as error:
        what = f"the weights {snap.weights} in {folder} are incomplete: {error}"
        yield Symptom(
            "stuck",
            what,
            None,
            "start the trainer again: it publishes them from its checkpoint",
        )


def _newest_letter(run: Run, snap: RunView) -> Iterator[Symptom]:
    if not snap.dead:
        return
    try:
        letters = list(islice(run.dead_letters.newest(), 1))
    except StoreError:
        return
    for letter in letters:
        what = f"the newest dead letter is {letter.gid}: {letter.reason:.200}"
        yield Symptom(
            "note",
            what,
            letter.age_ms,
            "fix the cause, then run `rolloutmq requeue` or `rolloutmq drop`",
        )


FEW = 20_000
"""Groups and keys up to which all of a run is checked: that takes a second or two."""

SHOWN = 5
"""Faults that are shown one by one."""

EPILOG = "Example: rolloutmq doctor --redis-url redis://queue.internal:6379/0"

_MARKS = {
    "ok": ("[ok  ]", "green"),
    "warning": ("[warn]", "yellow"),
    "error": ("[BAD ]", "bold red"),
}
_LEVELS = {
    "note": ("[note]", "dim"),
    "stuck": ("[WAIT]", "yellow"),
    "fault": ("[BAD ]", "bold red"),
}


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(doctor)


def doctor(
    redis_url: RedisUrl = None, run_dir: RunDir = None, run: RunName = None, as_json: AsJson = False
) -> None:
    """Check the server, and report what each run waits for.

    Reports since when it waits, and what to do. Exits with 3 if the server could lose data, else
    with 0.
    """
    with open_server(redis_url, run_dir) as (store, address):
        findings = store.retrying("check", lambda: check_all(store.servers))
        names = Run.names(store, damaged=True) if run is None else [choose_run(store, run)]
        diagnoses = {name: diagnose_run(store, name) for name in names}
    if as_json:
        runs = {
            name: [asdict(symptom) for symptom in found] for name, (_, found) in diagnoses.items()
        }
        emit(
            {
                "server": str(address),
                "findings": [asdict(found) for found in findings],
                "runs": runs,
            }
        )
    else:
        _show_server(console(), address, findings)
        for name, (snap, symptoms) in diagnoses.items():
            _show_run(console(), name, snap, symptoms)
        if not diagnoses:
            console().print("\nthere is no run on this server; `rolloutmq run CONFIG` starts one")
    if bad := [found for found in findings if found.level == "error"]:
        raise StoreUnsafe(
            f"{address} is not safe for a run: {len(bad)} of its settings could lose data or fail"
        )


def diagnose_run(store: Store, name: str) -> tuple[RunView | None, list[Symptom]]:
    """Return the snapshot of a run and its symptoms; no snapshot if the run cannot be opened."""
    try:
        run = Run.open(store, name)
        snap = read_run_view(run)
        return snap, worst_first([*diagnose(snap), *inspect(run, snap)])
    except StoreUnavailable:
        raise
    except (RunError, StoreError, SchemaVersionError) as error:
        fix = error.hint or "inspect it with the version that created it"
        return None, [Symptom("fault", error.message, None, fix)]


def _show_server(screen: Console, address: Address, findings: list[Finding]) -> None:
    screen.print(Text(f"server {address}", style="bold"))
    for found in findings:
        mark, style = _MARKS[found.level]
        screen.print(
            Text.assemble(
                (mark, style), f" {found.what}", (f": {found.why}" if found.why else "", "dim")
            )
        )
        if found.fix:
            screen.print(Text(f"       {found.fix}"))


def _show_run(screen: Console, name: str, snap: RunView | None, symptoms: list[Symptom]) -> None:
    quiet = last_event_ms(snap) if snap else None
    screen.print()
    last_event = "" if quiet is None else f"  last event {age(quiet)} ago"
    screen.print(Text.assemble((f"run {name}", "bold"), (last_event, "dim")))
    for symptom in symptoms:
        mark, style = _LEVELS[symptom.level]
        screen.print(Text.assemble((mark, style), f" {describe(symptom)}"))
        if symptom.fix:
            screen.print(Text(f"       {symptom.fix}"))
    if not any(symptom.level != "note" for symptom in symptoms):
        screen.print(Text.assemble(("[ok  ]", "green"), " nothing stops this run"))
