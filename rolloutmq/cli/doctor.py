"""`rolloutmq doctor`: check the server, and report what each run waits for."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from buffer.errors import StoreUnsafe
from buffer.redis.server.check import ServerFinding, check_all
from buffer.run import Run
from rolloutmq.command_list import command
from rolloutmq.options import Address, AsJson, RedisUrl, RunDir, RunName, choose_run, open_server
from rolloutmq.output import age, console, emit
from rolloutmq.views.diagnosis import Symptom, describe, last_event_ms
from rolloutmq.views.inspection import diagnose_run
from rolloutmq.views.run_view import RunView

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


@command(
    "Administration",
    "doctor",
    epilog="Example: rolloutmq doctor --redis-url redis://queue.internal:6379/0",
)
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


def _show_server(screen: Console, address: Address, findings: list[ServerFinding]) -> None:
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
