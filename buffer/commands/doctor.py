"""`rolloutmq doctor`: is the server fit to hold a run, and what does the run wait for?"""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from buffer.commands.diagnosis import Symptom, describe, diagnose, last_event_ms, worst_first
from buffer.commands.screen import age, console, emit
from buffer.commands.surroundings import look_around
from buffer.commands.target import Address, AsJson, RedisUrl, RunDir, RunName, choose_run, open_server
from buffer.errors import RunNotFound, SchemaVersionError, StoreUnsafe
from buffer.run import Run
from buffer.server.check import Finding, check_all
from buffer.store import Store
from buffer.watch.snapshot import Snapshot, take_snapshot

EPILOG = "Example: rolloutmq doctor --redis-url redis://queue.internal:6379/0"

_MARKS = {"ok": ("[ok  ]", "green"), "warning": ("[warn]", "yellow"), "error": ("[BAD ]", "bold red")}
_LEVELS = {"note": ("[note]", "dim"), "stuck": ("[WAIT]", "yellow"), "fault": ("[BAD ]", "bold red")}


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(doctor)


def doctor(redis_url: RedisUrl = None, run_dir: RunDir = None, run: RunName = None, as_json: AsJson = False) -> None:
    """Check the server; say what a run waits for.

    Says since when, and what to do. Exit code 3 if the server would lose data, 0 otherwise.
    """
    with open_server(redis_url, run_dir) as (store, address):
        findings = store.retrying("check", lambda: check_all(store.servers))
        names = Run.names(store) if run is None else [choose_run(store, run)]
        looks = {name: _look(store, name) for name in names}
    if as_json:
        runs = {name: [asdict(symptom) for symptom in found] for name, (_, found) in looks.items()}
        emit({"server": str(address), "findings": [asdict(found) for found in findings], "runs": runs})
    else:
        _show_server(console(), address, findings)
        for name, (snap, symptoms) in looks.items():
            _show_run(console(), name, snap, symptoms)
        if not looks:
            console().print("\nno run is on this server; `rolloutmq run CONFIG` starts one")
    if bad := [found for found in findings if found.level == "error"]:
        raise StoreUnsafe(f"{address} must not hold a run as it is: {len(bad)} of its settings would lose data or fail")


def _look(store: Store, name: str) -> tuple[Snapshot | None, list[Symptom]]:
    """A run and its symptoms; no snapshot where it cannot be opened, which must not hide the others."""
    try:
        run = Run.open(store, name)
    except (RunNotFound, SchemaVersionError) as error:
        return None, [Symptom("fault", error.message, None, error.hint or "look at it with the version that made it")]
    snap = take_snapshot(run)
    return snap, worst_first([*diagnose(snap), *look_around(run, snap)])


def _show_server(screen: Console, address: Address, findings: list[Finding]) -> None:
    screen.print(Text(f"server {address}", style="bold"))
    for found in findings:
        mark, style = _MARKS[found.level]
        screen.print(Text.assemble((mark, style), f" {found.what}", (f": {found.why}" if found.why else "", "dim")))
        if found.fix:
            screen.print(Text(f"       {found.fix}"))


def _show_run(screen: Console, name: str, snap: Snapshot | None, symptoms: list[Symptom]) -> None:
    quiet = last_event_ms(snap) if snap else None
    screen.print()
    screen.print(Text.assemble((f"run {name}", "bold"),
                               (f"  last event {age(quiet)} ago" if quiet is not None else "", "dim")))  # fmt: skip
    for symptom in symptoms:
        mark, style = _LEVELS[symptom.level]
        screen.print(Text.assemble((mark, style), f" {describe(symptom)}"))
        if symptom.fix:
            screen.print(Text(f"       {symptom.fix}"))
    if not any(symptom.level != "note" for symptom in symptoms):
        screen.print(Text.assemble(("[ok  ]", "green"), " nothing keeps this run from going on"))
