"""`rolloutmq pause`, `resume` and `drain`: the operator's pause of a run.

It is separate from the trainer's own pauses around weight updates: neither ends the other (I10).
Only if the trainer died during a pause of its own, `resume` ends that one, too.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from buffer.control.control import ControlState, Mode
from buffer.errors import ConfigError, PauseTimeout
from buffer.run import Run
from rolloutmq.console import console
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import age, emit, plural
from rolloutmq.views.run_view import read_run_view

PAUSE_EPILOG = "Example: rolloutmq pause --mode drain --wait"
RESUME_EPILOG = "Example: rolloutmq resume --wait"

Report = Callable[[str], object]


class PauseMode(StrEnum):
    """What happens to running groups."""

    ABORT = "abort"
    DRAIN = "drain"
    KEEP = "keep"


Wait = Annotated[bool, typer.Option("--wait", help="Wait until every live worker has confirmed.")]
Timeout = Annotated[
    float | None, typer.Option(min=0, help="Seconds to wait. Default: the run's pause_timeout_s.")
]


def register(app: typer.Typer) -> None:
    app.command(epilog=PAUSE_EPILOG)(pause)
    app.command(epilog=RESUME_EPILOG)(resume)
    app.command(epilog=DRAIN_EPILOG)(drain)


def pause(
    mode: Annotated[
        PauseMode,
        typer.Option(
            help="Running groups are returned (abort), finished (drain) or frozen (keep)."
        ),
    ] = PauseMode.ABORT,
    wait: Wait = False,
    timeout: Timeout = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Pause a run until `rolloutmq resume`.

    No worker claims anything during the pause. The trainer's own pauses, around weight updates,
    are separate.
    """
    with open_target(redis_url, run_dir, run) as target:
        _hold(target.run, Mode(mode.value), wait, timeout, as_json)


def resume(
    folder: Annotated[str | None, typer.Argument(hidden=True)] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Restart this task, which was stopped after too many failures in a row."),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(help="Let this worker claim again, which was barred for what it submitted."),
    ] = None,
    wait: Wait = False,
    timeout: Timeout = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """End the operator's pause of a run.

    A pause of the trainer stays, unless that trainer has left or sends no heartbeat: then it ends,
    too.
    """
    if folder is not None:
        raise ConfigError(
            f"`rolloutmq resume` ends a pause and takes no folder: {folder}",
            hint=f"`rolloutmq restore {shlex.quote(folder)}` brings a saved run to a server",
        )
    if task is not None and worker is not None:
        raise ConfigError("pass either --task or --worker", hint="run the command once for each")
    with open_target(redis_url, run_dir, run) as target:
        if task is not None:
            _forgive(target.run, task, as_json)
        elif worker is not None:
            _admit(target.run, worker, as_json)
        else:
            _hold(target.run, Mode.RUN, wait, timeout, as_json)


def _forgive(run: Run, task: str, as_json: bool) -> None:
    if task not in run.limits.tasks:
        raise ConfigError(
            f"there is no task {task!r}", hint=f"one of {', '.join(run.limits.tasks)}"
        )
    failures = int(run.progress(task).get("failures_in_row", 0))
    run.jobs.forgive(task)
    if as_json:
        emit({"task": task, "failures": failures})
    else:
        console().print(f"{task} continues: {plural(failures, 'failure')} in a row reset")


def _admit(run: Run, worker: str, as_json: bool) -> None:
    bad = run.fleet.admit(worker)
    if as_json:
        emit({"worker": worker, "bad_groups": bad})
    elif bad:
        console().print(f"{worker} may claim again: {plural(bad, 'bad group')} reset")
    else:
        console().print(f"{worker} was not barred")


def hold(run: Run, mode: Mode, report: Report) -> tuple[ControlState, bool]:
    """Set the operator's mode, and report it in words.

    Returns the control state, and whether it is new.
    """
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


def _hold(run: Run, mode: Mode, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    report: Report = (lambda line: None) if as_json else console().print
    start = time.monotonic()
    state, changed = hold(run, mode, report)
    receipts = _ReceiptLog(run, report)
    failure = receipts.wait(state, timeout_s) if wait else None
    took_s = time.monotonic() - start
    silent = [] if wait and not failure else run.receipts.silent(state.epoch)
    confirmed = sorted(_live(run) - set(silent))
    if as_json:
        emit(_report(run, state.mode, state.epoch, changed, confirmed, silent, took_s))
    else:
        report(_summary(confirmed, silent, took_s, wait))
    if failure:
        raise failure


class _ReceiptLog:
    """Waits for the workers' receipts and prints each worker as it confirms."""

    def __init__(self, run: Run, report: Report) -> None:
        self._run = run
        self._report = report
        self._start = time.monotonic()
        self._confirmed: set[str] = set()

    def wait(self, state: ControlState, timeout_s: float | None) -> PauseTimeout | None:
        """Wait for all; return the error that is due once the silent ones are reported."""
        try:
            self._run.receipts.wait(state, timeout_s=timeout_s, watch=self._print_new)
        except PauseTimeout as error:
            return error
        return None

    def _print_new(self, silent: list[str]) -> None:
        for worker in sorted(_live(self._run) - set(silent) - self._confirmed):
            self._confirmed.add(worker)
            self._report(f"  {worker} confirmed after {time.monotonic() - self._start:.2f} s")


def _operator_mode(run: Run) -> Mode:
    field: Any = run.store.retrying(
        "mode", lambda: run.store.control.hget(run.keys.control, "operator_mode")
    )
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


def _live(run: Run) -> set[str]:
    return {worker.id for worker in run.fleet.workers() if worker.is_live(run.limits.lease_ms)}


def _summary(confirmed: list[str], silent: list[str], took_s: float, waited: bool) -> str:
    if not confirmed and not silent:
        return "no worker is alive, so none has to confirm"
    if not silent:
        return f"all {len(confirmed)} live workers have confirmed, {age(took_s * 1000)}"
    hint = "" if waited else "; pass --wait to wait for them"
    return (
        f"{len(confirmed)} confirmed ({', '.join(confirmed) or 'none'}), not yet: "
        f"{', '.join(silent)}{hint}"
    )


def _report(
    run: Run,
    mode: Mode,
    epoch: int,
    changed: bool,
    confirmed: list[str],
    silent: list[str],
    took_s: float,
) -> dict[str, Any]:
    return {
        "run": run.name,
        "mode": mode,
        "epoch": epoch,
        "changed": changed,
        "confirmed": confirmed,
        "silent": silent,
        "took_s": round(took_s, 3),
    }


DRAIN_EPILOG = """
\b
Example: rolloutmq drain && rolloutmq save backup && rolloutmq resume
"""

POLL_S = 0.2
"""Seconds between polls: there is no wake-up for the end of the last lease."""

DrainTimeout = Annotated[
    float, typer.Option(min=0, help="Seconds to wait for the last group to finish.")
]


def drain(
    timeout: DrainTimeout = 3600.0,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Finish the running groups and claim no new ones.

    Waits until no group runs. The run is then at rest, with all results in its pools, until
    `rolloutmq resume`.
    """
    with open_target(redis_url, run_dir, run) as target:
        started = time.monotonic()
        target.run.control.set_mode("operator", Mode.DRAIN)
        left = _wait_until_drained(target.run, started + timeout, quiet=as_json)
    took_s = time.monotonic() - started
    if left:
        raise PauseTimeout(
            f"{plural(left, 'group')} still running after {took_s:.0f} s; the run "
            "stays in drain mode",
            hint="`rolloutmq ls --stage running` lists them; `rolloutmq pause --mode "
            "abort` returns them",
        )
    if as_json:
        emit({"run": target.run.name, "mode": "drain", "seconds": took_s})
    else:
        console().print(
            f"no group is running, after {age(took_s * 1000)}; `rolloutmq resume` ends the pause"
        )


def _wait_until_drained(run: Run, end: float, *, quiet: bool) -> int:
    """Wait until no group runs or time is up; return how many are left."""
    reported = -1
    while (left := run.account.totals().leases) and time.monotonic() < end:
        if left != reported and not quiet:
            console().print(f"{plural(left, 'group')} to finish")
        reported = left
        time.sleep(POLL_S)
    return left
