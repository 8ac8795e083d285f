"""`rolloutmq doctor`: check the server, and report what each run waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from rich.text import Text

from buffer.errors import StoreUnsafe
from buffer.redis.server.check import check_all
from buffer.run.run import Run
from rolloutmq.command_list import command
from rolloutmq.options import (
    AsJson,
    Output,
    RedisUrl,
    RunDir,
    RunName,
    choose_run,
    folder_of,
    open_server,
)
from rolloutmq.output import age
from rolloutmq.views.explain.diagnosis import Symptom, diagnose_run, last_event_ms, marked
from rolloutmq.views.run_view import RunView


@command("doctor", epilog="Example: rolloutmq doctor --redis-url redis://queue.internal:6379/0")
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
        find_folder = partial(folder_of, named=address.run_dir)
        diagnoses = {name: diagnose_run(store, name, find_folder) for name in names}
    runs = {name: [asdict(symptom) for symptom in found] for name, (_, found) in diagnoses.items()}
    document = {"server": str(address), "findings": [asdict(found) for found in findings]}
    shown = [Text(f"server {address}", style="bold")]
    for found in findings:
        why = f": {found.why}" if found.why else ""
        shown.append(marked(found.level, Text.assemble(found.what, (why, "dim")), found.fix))
    for name, (view, symptoms) in diagnoses.items():
        shown += _run(name, view, symptoms)
    if not diagnoses:
        shown.append(Text("\nthere is no run on this server; `rolloutmq run CONFIG` starts one"))
    Output(document | {"runs": runs}, shown).print(as_json=as_json)
    if bad := [found for found in findings if found.level == "error"]:
        raise StoreUnsafe(
            f"{address} is not safe for a run: {len(bad)} of its settings could lose data or fail"
        )


def _run(name: str, view: RunView | None, symptoms: list[Symptom]) -> Iterator[Text]:
    quiet = last_event_ms(view) if view else None
    last_event = "" if quiet is None else f"  last event {age(quiet)} ago"
    yield Text.assemble((f"\nrun {name}", "bold"), (last_event, "dim"))
    yield from (symptom.text() for symptom in symptoms)
    if all(symptom.level == "note" for symptom in symptoms):
        yield marked("ok", "nothing stops this run")
