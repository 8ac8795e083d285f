"""`rolloutmq fsck` and `doctor`: check a live run and its server.

`fsck` makes three checks: the totals at one instant add up (I1); each draw is in exactly one stage;
no group is in two manifests or, if the trainer's `steps.jsonl` is accessible, in two surviving
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from buffer.errors import AccountError, StoreUnavailable, StoreUnsafe
from buffer.imports import attached, load_object
from buffer.ledger.account import FsckReport
from buffer.redis.key_fields import Damage
from buffer.redis.server.check import check_all
from buffer.run.run import Run
from consumer.handle.step_log import STEPS_FILE, StepLog
from rolloutmq.command_list import command
from rolloutmq.options import (
    AsJson,
    Output,
    RedisUrl,
    RunDir,
    RunName,
    Target,
    choose_run,
    folder_of,
    folder_without_server,
    on_run,
    open_server,
)
from rolloutmq.output import age, count, plural, progress
from rolloutmq.views.explain.diagnosis import diagnose_run, last_event_ms
from rolloutmq.views.explain.symptom import marked
from rolloutmq.views.run_folder import RunFolder
from rolloutmq.views.screen import groups_table

_SHOWN = 20

AUDITS = "rolloutmq.audits"
"""The group of entry points whose functions return further faults of a run, as sentences."""


@command("fsck", epilog="Example: rolloutmq fsck --run-dir runs/demo && echo clean")
@on_run
def fsck(target: Target, as_json: AsJson = False) -> None:
    """Check that nothing is lost and nothing was trained twice.

    Checks every group in all indexes, on a live run. With the run's folder, it also checks what
    the trainer recorded. Exits with 6 if something is wrong: `rolloutmq run CONFIG --regenerate`
    then makes the run again from its newest checkpoint.
    """
    with progress(as_json) as advance:
        found = target.run.account.fsck(
            lambda done, total: advance(f"checked, of {count(total)} groups", done)
        )
    for spec in attached(AUDITS).values():
        found.damage += map(Damage, load_object(spec, kind="audit")(target.run))
    folder = target.run_dir
    has_log = folder and (folder / STEPS_FILE).is_file()
    steps = RunFolder(folder).log if folder and has_log else None
    risks = could_lose(target.run)
    warnings = [Text(f"[warn] {risk}", style="yellow") for risk in risks]
    document = report(found, steps) | {"could_lose": risks}
    Output(document, [*verdicts(found, steps), *warnings]).print(as_json=as_json)
    twice = steps.trained_twice() if steps else {}
    if twice or not found.clean:
        raise AccountError(
            f"{plural(len(found.lost), 'group')} lost, {len(found.doubled)} in two "
            f"stages, {len(twice)} trained twice, "
            f"{len(found.faults)} further faults",
            hint="`rolloutmq run CONFIG --regenerate` makes the run again from its newest "
            "checkpoint; please report this, with the output of --json",
        )


def could_lose(run: Run) -> list[str]:
    """Return how the server could lose data with its settings."""
    findings = run.store.retrying("check", lambda: check_all(run.store.servers))
    return [f"{finding.what}: {finding.why}" for finding in findings if finding.level != "ok"]


def report(found: FsckReport, steps: StepLog | None) -> dict[str, Any]:
    twice = steps.trained_twice() if steps else {}
    return {
        "clean": found.clean and not twice,
        "checked": found.checked,
        "leases": found.leases,
        "tasks": {
            task.task: {
                "enqueued": task.enqueued,
                "put": task.put,
                "imported": task.imported,
                "places": task.stages,
            }
            for task in found.tasks
        },
        "faults": found.faults,
        "lost": found.lost,
        "doubled": found.doubled,
        "damage": [each._asdict() for each in found.damage],
        "trained_twice": twice,
        "trained_steps": len(steps.steps) if steps else None,
        "replayed_steps": steps.replaced if steps else None,
        "torn_lines": steps.torn if steps else None,
    }


def verdicts(found: FsckReport, steps: StepLog | None) -> Iterator[RenderableType]:
    """Yield the table of stages, then one line per check."""
    yield groups_table(found.tasks)
    yield ""
    yield _verdict("all keys are as they must be, and the totals add up", found.faults)
    yield _verdict(f"0 of {count(found.checked)} groups are lost", found.lost, "lost")
    yield _verdict("no group is in two stages or two batches", found.doubled, "doubled")
    if steps is None:
        what = "there is no steps.jsonl (see --run-dir); only manifests were checked"
        yield Text(f"[ - ] trained twice: {what}", style="dim")
        return
    groups = sum(len(step.gids) for step in steps.steps)
    good = f"no group was trained twice: {count(groups)} groups in {count(len(steps.steps))} steps"
    if steps.replaced:
        good += f"; {plural(steps.replaced, 'step')} replaced after a restart from a checkpoint"
    twice = [
        f"{gid} in steps {', '.join(map(str, where))}"
        for gid, where in steps.trained_twice().items()
    ]
    yield _verdict(good, twice, "trained twice")


def _verdict(good: str, bad: list[str], word: str = "wrong") -> Text:
    if not bad:
        return Text.assemble(("[ok ] ", "green"), good)
    lines = [f"      {line}" for line in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"      and {len(bad) - _SHOWN} more: see --json")
    text = Text(f"[BAD] {len(bad)} {word}", style="bold red")
    return text.append("\n" + "\n".join(lines), style="not bold red")


def read_folder(read: RunFolder, error: StoreUnavailable) -> Output:
    lost = f"run {read.name}, from its folder: {error.message}"
    found = [asdict(symptom) for symptom in read.findings]
    document: dict[str, Any] = {"server": None, "error": error.message, "findings": []}
    document["runs"] = {read.name: found}
    shown = [Text(lost, style="yellow"), *(symptom.text() for symptom in read.findings)]
    return Output(document, shown)


@command("doctor", epilog="Example: rolloutmq doctor --redis-url redis://queue.internal:6379/0")
def doctor(
    redis_url: RedisUrl = None, run_dir: RunDir = None, run: RunName = None, as_json: AsJson = False
) -> None:
    """Check the server, and report what each run waits for.

    Reports since when it waits, and what to do. Exits with 3 if the server could lose data, else
    with 0. Of a run whose server is lost, it reports how the run ended, from its folder.
    """
    try:
        with open_server(redis_url, run_dir) as (store, address):
            findings = store.retrying("check", lambda: check_all(store.servers))
            names = Run.names(store, damaged=True) if run is None else [choose_run(store, run)]
            find_folder = partial(folder_of, named=address.run_dir)
            diagnoses = {name: diagnose_run(store, name, find_folder) for name in names}
    except StoreUnavailable as error:
        folder = folder_without_server(redis_url, run_dir, run)
        if folder is None:
            raise
        read_folder(RunFolder(folder), error).print(as_json=as_json)
        return
    runs = {name: [asdict(symptom) for symptom in found] for name, (_, found) in diagnoses.items()}
    document = {"server": str(address), "findings": [asdict(found) for found in findings]}
    shown = [Text(f"server {address}", style="bold")]
    for found in findings:
        why = f": {found.why}" if found.why else ""
        shown.append(marked(found.level, Text.assemble(found.what, (why, "dim")), found.fix))
    for name, (view, symptoms) in diagnoses.items():
        quiet = last_event_ms(view) if view else None
        last_event = "" if quiet is None else f"  last event {age(quiet)} ago"
        shown.append(Text.assemble((f"\nrun {name}", "bold"), (last_event, "dim")))
        shown += [symptom.text() for symptom in symptoms]
        if all(symptom.level == "note" for symptom in symptoms):
            shown.append(marked("ok", "nothing stops this run"))
    if not diagnoses:
        shown.append(Text("\nthere is no run on this server; `rolloutmq run CONFIG` starts one"))
    Output(document | {"runs": runs}, shown).print(as_json=as_json)
    if bad := [found for found in findings if found.level == "error"]:
        raise StoreUnsafe(
            f"{address} is not safe for a run: {len(bad)} of its settings could lose data or fail"
        )
