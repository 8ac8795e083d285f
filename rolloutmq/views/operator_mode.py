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
    field: Any = run.store.ask("mode", "HGET", run.keys.control, "operator_mode")
    is_set = (field.decode() if field else Mode.RUN) == mode
    changed = not is_set or is_orphan
    state = run.control.set_mode("operator", mode, orphan=is_orphan) if changed else before
    if is_orphan:
        report(
            f"run {run.name}: its trainer paused it ({before.mode}) and is gone; that "
            "pause is ended, too"
        )
    said = "resumed" if changed else "it was not paused by an operator"
    by_trainer = (
        "" if state.mode is Mode.RUN else f"; the trainer itself has paused it ({state.mode})"
    )
    if mode is not Mode.RUN:
        said = f"{'paused' if changed else 'was already paused'} by the operator ({mode})"
        by_trainer = ""
    report(f"run {run.name}: {said}, control epoch {state.epoch}{by_trainer}")
    return state, changed
