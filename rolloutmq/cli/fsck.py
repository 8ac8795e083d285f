"""`rolloutmq fsck`: check, on a live run, that nothing is lost and nothing was trained twice.

Three checks: the totals at one instant add up (I1); each draw is in exactly one stage; no group
is in two manifests or, if the trainer's `steps.jsonl` is accessible, in two surviving steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from buffer.errors import AccountError
from buffer.ledger.account import FsckReport
from buffer.redis.server.check import check_all
from buffer.run.run import Run
from consumer.handle.step_log import STEPS_FILE, StepLog
from rolloutmq.command_list import command
from rolloutmq.options import AsJson, Output, Target, on_run
from rolloutmq.output import count, plural, progress
from rolloutmq.views.run_folder import RunFolder
from rolloutmq.views.screen import groups_table

_SHOWN = 20


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
