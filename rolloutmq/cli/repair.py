"""`rolloutmq fsck --repair` and `--undo`: rebuild what is damaged, and take that back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from buffer.errors import ConfigError, ModelError
from buffer.ledger.position import Position
from buffer.maintenance.repair.repair import Plan, Repair
from buffer.model.ids import new_nonce
from consumer.grpo.checkpoint import CheckpointFolder
from rolloutmq.console import console
from rolloutmq.options import Target
from rolloutmq.output import plural

COPIES = "repairs"
"""Folder, in that of the run, with a copy of what each repair changed."""

_SHOWN = 10


def repair_run(target: Target, *, yes: bool, quiet: bool) -> dict[str, Any]:
    """Repair a run; return what was changed, for programs. Raises ConfigError without `yes`."""
    run = target.run
    position = newest_position(target)
    repair = Repair(run.store, run.keys, run.limits, run.nonce, position)
    plan = repair.plan()
    if not quiet:
        _show(console(), plan, position)
    if not (plan.damaged or plan.payloads):
        return {"repair": _facts(plan, None)}
    copy = _new_copy(target)
    if not yes:
        keys = plural(len(plan.damaged) + len(plan.payloads), "key")
        raise ConfigError(
            f"this would rebuild {keys} of run {run.name!r}; nothing was changed",
            hint="stop all processes of the run and pass --yes; a copy of what changes is "
            f"written to {copy.parent}",
        )
    plan = repair.carry_out(copy)
    if not quiet:
        console().print(
            f"repaired; to take it back before the run is started: rolloutmq fsck --undo {copy}",
            soft_wrap=True,
        )
    return {"repair": _facts(plan, copy)}


def undo_repair(target: Target, copy: Path, *, yes: bool, quiet: bool) -> dict[str, Any]:
    """Put back what a repair changed. Raises ConfigError without `yes`, SnapshotError."""
    run = target.run
    if not yes:
        raise ConfigError(
            f"this would put run {run.name!r} back as it was before; nothing was changed",
            hint="pass --yes to do it",
        )
    keys = Repair(run.store, run.keys, run.limits, run.nonce).undo(copy)
    if not quiet:
        console().print(f"{plural(keys, 'key')} put back")
    return {"undone": str(copy)}


def newest_position(target: Target) -> Position | None:
    """Return the position of the newest checkpoint in the run's folder that can be read."""
    if target.run_dir is None:
        return None
    checkpoints = CheckpointFolder(target.run_dir / "checkpoints")
    for step in reversed(checkpoints.steps()):
        try:
            position = checkpoints.read(step)
        except ModelError:  # the trainer passes over it as well, with a warning
            continue
        if position.run_nonce == target.run.nonce:
            return position
    return None


def _new_copy(target: Target) -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{new_nonce()[:6]}.jsonl"
    return (target.run_dir or Path()) / COPIES / name


def _facts(plan: Plan, copy: Path | None) -> dict[str, Any]:
    return {
        "keys": [*plan.damaged, *plan.payloads],
        "drawn_again": plan.lost,
        "closed": plan.closed,
        "notes": plan.notes,
        "copy": str(copy) if copy else None,
    }


def _show(screen: Console, plan: Plan, position: Position | None) -> None:
    damaged = [*plan.damaged, *plan.payloads]
    if not damaged:
        screen.print("nothing to repair")
        return
    known = f"the checkpoint of step {position.step}" if position else "no checkpoint"
    screen.print(Text(f"repair, with {known} of the trainer"))
    _line(screen, "rebuilt", "key", damaged)
    _line(screen, "drawn again", "group", plan.lost)
    _line(screen, "closed, not drawn again", "group", plan.closed)
    if plan.closed and position is None:
        text = "a checkpoint would say which of them were trained: see --run-dir"
        screen.print(Text(f"  {text}", style="yellow"))
    for note in plan.notes:
        screen.print(Text(f"  {note}"))


def _line(screen: Console, what: str, kind: str, names: list[str]) -> None:
    if not names:
        return
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = ", ".join(names[:_SHOWN])
    screen.print(Text(f"  {plural(len(names), kind)} {what}: {shown}{more}"), soft_wrap=True)
