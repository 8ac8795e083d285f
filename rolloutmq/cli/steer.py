"""`rolloutmq pause`, `resume`, `drain` and `set`: steer a run while it continues."""

from __future__ import annotations

import getpass
import socket
import time
from typing import Annotated, Literal

from typer import Argument, Option

from buffer.control.control import Mode
from buffer.errors import ConfigError, PauseTimeout
from buffer.readable import visible
from buffer.run.run import Run
from buffer.run.settings import LiveSettings, LiveTaskSettings, parse_change
from rolloutmq.command_list import command
from rolloutmq.options import AsJson, Output, Target, on_run, require_known
from rolloutmq.output import age, console, plural, table
from rolloutmq.views.setting_view import overrides, set_operator_mode, time_text, value_text

Wait = Annotated[bool, Option("--wait", help="Wait until every live worker has confirmed.")]
Timeout = Annotated[
    float | None, Option(min=0, help="Seconds to wait. Default: the run's pause_timeout_s.")
]


@command("pause", epilog="Example: rolloutmq pause --mode drain --wait")
@on_run
def pause(
    target: Target,
    mode: Annotated[
        Literal["abort", "drain", "keep"],
        Option(help="Running groups are returned (abort), finished (drain) or frozen (keep)."),
    ] = "abort",
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> Output:
    """Pause a run until `rolloutmq resume`.

    No worker claims anything during the pause. The trainer's own pauses, around weight updates,
    are separate.
    """
    return _hold(target.run, Mode(mode), wait, timeout, as_json)


@command("resume", epilog="Example: rolloutmq resume --wait")
@on_run
def resume(
    target: Target,
    task: Annotated[
        str | None,
        Option(help="Restart this task, which was stopped after too many failures in a row."),
    ] = None,
    worker: Annotated[
        str | None,
        Option(help="Let this worker claim again, which was barred for what it submitted."),
    ] = None,
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> Output:
    """End the operator's pause of a run.

    A pause of the trainer stays, unless that trainer has left or sends no heartbeat: then it ends,
    too.
    """
    if task is not None and worker is not None:
        raise ConfigError("pass either --task or --worker", hint="run the command once for each")
    if task is not None:
        require_known("task", task, target.run.limits.tasks)
        failures = int(target.run.progress(task).get("failures_in_row", 0))
        target.run.jobs.resume_task(task)
        said = f"{task} continues: {plural(failures, 'failure')} in a row reset"
        return Output({"task": task, "failures": failures}, said)
    if worker is not None:
        bad = target.run.fleet.unbar(worker)
        said = f"{worker} may claim again: {plural(bad, 'bad group')} reset"
        document = {"worker": worker, "bad_groups": bad}
        return Output(document, said if bad else f"{worker} was not barred")
    return _hold(target.run, Mode.RUN, wait, timeout, as_json)


def _hold(run: Run, mode: Mode, wait: bool, timeout_s: float | None, as_json: bool) -> Output:
    """Set the operator's mode, and wait for all receipts if asked. Raises PauseTimeout."""
    start = time.monotonic()
    report = (lambda _: None) if as_json else console().print
    state, changed = set_operator_mode(run, mode, report)
    if wait:
        run.receipts.wait(state, timeout_s=timeout_s)
    took_s = time.monotonic() - start
    silent = run.receipts.silent(state.epoch)
    lease_ms = run.limits.lease_ms
    live = {worker.id for worker in run.fleet.workers() if worker.is_live(lease_ms)}
    confirmed = sorted(live - set(silent))
    facts = {"run": run.name, "mode": state.mode, "epoch": state.epoch, "changed": changed}
    lists = {"confirmed": confirmed, "silent": silent, "took_s": round(took_s, 3)}
    said = f"all {len(confirmed)} live workers have confirmed, {age(took_s * 1000)}"
    if silent:
        said = (
            f"{len(confirmed)} confirmed ({', '.join(confirmed) or 'none'}), not yet: "
            f"{', '.join(silent)}{'' if wait else '; pass --wait to wait for them'}"
        )
    elif not confirmed:
        said = "no worker is alive, so none has to confirm"
    return Output(facts | lists, said)


POLL_S = 0.2  # it must poll: nothing signals the end of the last lease


@command("drain", epilog="Example: rolloutmq drain && rolloutmq save backup")
@on_run
def drain(
    target: Target,
    timeout: Annotated[
        float, Option(min=0, help="Seconds to wait for the last group to finish.")
    ] = 3600.0,
    as_json: AsJson = False,
) -> Output:
    """Finish the running groups and claim no new ones.

    Waits until no group runs. The run is then at rest, with all results in its pools, until
    `rolloutmq resume`.
    """
    started = time.monotonic()
    target.run.control.set_mode("operator", Mode.DRAIN)
    reported = -1
    while (left := target.run.account.totals().leases) and time.monotonic() < started + timeout:
        if left != reported and not as_json:
            console().print(f"{plural(left, 'group')} to finish")
        reported = left
        time.sleep(POLL_S)
    took_s = time.monotonic() - started
    if left:
        raise PauseTimeout(
            f"{plural(left, 'group')} still running after {took_s:.0f} s; the run "
            "stays in drain mode",
            hint="`rolloutmq ls --stage running` lists them; `rolloutmq pause --mode "
            "abort` returns them",
        )
    said = f"no group is running, after {age(took_s * 1000)}; `rolloutmq resume` ends the pause"
    return Output({"run": target.run.name, "mode": "drain", "seconds": took_s}, said)


EPILOG = """
\b
Examples: rolloutmq set max_staleness=2 tasks.math.weight=3
          rolloutmq set max_staleness=config    as the config says
          rolloutmq set --list                  what differs from the config
"""

_SETTINGS = [name for name in LiveSettings.model_fields if name != "tasks"]
_SETTINGS += [f"tasks.<name>.{name}" for name in LiveTaskSettings.model_fields]


@command("set", epilog=EPILOG)
@on_run
def set_(
    target: Target,
    settings: Annotated[
        list[str] | None,
        Argument(metavar="NAME=VALUE...", help=f"Settings to change: {', '.join(_SETTINGS)}."),
    ] = None,
    listed: Annotated[
        bool, Option("--list", help="List what differs from the config, and since when.")
    ] = False,
) -> Output:
    """Change settings of a run while it continues.

    Every process applies them at its next heartbeat, round or batch. They belong to the run, and
    survive the end of every process and of the server. A setting holds until it is set again, or
    until the run is started with a config in which its value has changed. NAME=config sets the
    value of the config. New task weights apply from the first train step for which no group has
    been started.
    """
    if bool(settings) == listed:
        raise ConfigError(
            "pass NAME=VALUE, or --list", hint="`rolloutmq set max_staleness=2` sets one"
        )
    wanted, restored = parse_change(settings or [])
    if listed:
        found = list(overrides(target.run.settings))
        grid = table("setting", "config", "now", "since", "by")
        for each in found:
            name, config = each["name"], value_text(each["name"], each["config"])
            row = (name, config, str(each["value"]), time_text(each["set_ms"]), each["by"] or "-")
            grid.add_row(*map(visible, row))
        return Output({"settings": found}, grid if found else "every setting is as in the config")
    changes = target.run.set(wanted, restored=restored, by=_who(), folder=target.run_dir)
    said, document = [], {}
    for name, (before, after) in changes.items():
        said.append(f"{name}: {value_text(name, before)} -> {value_text(name, after)}")
        document[name] = {"before": before, "after": after}
    nothing = "nothing to change: the run has these settings already"
    return Output({"changed": document}, said or nothing)


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user id without a name, as in containers
        return socket.gethostname()
