"""Set the operator's mode of a run, for `pause`, `resume` and the browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from buffer.control.control import ControlState, Mode
from buffer.run.run import Run
from rolloutmq.views.run_view import read_run_view

Report = Callable[[str], object]


def set_operator_mode(run: Run, mode: Mode, report: Report) -> tuple[ControlState, bool]:
    """Set and report the operator's mode; return the control state, and whether it is new."""
    before = run.control.state()
    is_orphan = mode is Mode.RUN and read_run_view(run).is_orphaned
    changed = _operator_mode(run) is not mode or is_orphan
    state = run.control.set_mode("operator", mode, orphan=is_orphan) if changed else before
    if is_orphan:
        report(
            f"run {run.name}: its trainer paused it ({before.mode}) and is gone; that "
            "pause is ended, too"
        )
    report(_headline(run, mode, state.mode, state.epoch, changed))
    return state, changed


def _operator_mode(run: Run) -> Mode:
    field: Any = run.store.ask("mode", "HGET", run.keys.control, "operator_mode")
    return Mode(field.decode()) if field else Mode.RUN


def _headline(run: Run, wanted: Mode, actual: Mode, epoch: int, changed: bool) -> str:
    if wanted is Mode.RUN:
        first = (
            f"run {run.name}: resumed"
            if changed
            else f"run {run.name}: it was not paused by an operator"
        )
        trainer = "" if actual is Mode.RUN else f"; the trainer itself has paused it ({actual})"
        return f"{first}, control epoch {epoch}{trainer}"
    first = "paused" if changed else "was already paused"
    return f"run {run.name}: {first} by the operator ({wanted}), control epoch {epoch}"
