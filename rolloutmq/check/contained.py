"""The list of checks, and the process in which they run, which may hang, crash or exit.

    parent ──▶ python -m rolloutmq.check STAGES quick|all SKIP CONFIG OVERRIDES…     (JSON lines)
       ▲            {"begins": 3, "section": …, "what": …, "waits_s": …}    before a unit
       ├──────────  {"section": …, "level": …, "what": …}                   a finding
       └──────────  {"done": true}                                          the end

A unit that ends its process or exceeds its limit is an error; a new process runs the next units.
`rolloutmq run` makes the quick ones, `rolloutmq check` all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import orjson

from buffer.imports import check_module, is_dotted_path
from producer_workers.follow_owner import OWNER, follow_owner, how_ended, kill_session
from producer_workers.user_functions import NamedFunction, named_functions
from rolloutmq.check.finding import Finding, Unit
from rolloutmq.config.config import Config
from rolloutmq.config.load import inspect_config
from rolloutmq.config.sources import fetch
from rolloutmq.presets import find_config

START_S = 600.0  # a process imports what its stage needs within this time
LIMIT_S = 300.0  # for one unit, beside the time that it expects to wait
EXIT_S = 5.0  # a finished process exits within this time: threads of user code may keep it
Line = dict[str, Any]


# -- the list -------------------------------------------------------------------------------------

STAGES = ("functions", "model", "data")


def units_of(stage: str, config: Config, *, quick: bool = False) -> list[Unit]:
    """Return the units of a stage, or its quick ones: the same ones in every process."""
    if stage == "functions":
        return [Unit(stage, each.key, partial(_import, each)) for each in _functions(config)]
    # only here, because a stage imports what it needs
    made: list[Unit] = import_module(f"rolloutmq.check.{stage}").units(config, quick=quick)
    return made


def _functions(config: Config) -> list[NamedFunction]:
    """Return the functions and classes that any process of the run imports, each once."""
    found = named_functions(config)
    of_the_trainer = {
        "[trainer] loop": config.trainer.loop or "",
        "[trainer] advantages": config.trainer.advantages,
        "[learner.loss] objective": config.learner.loss.objective,
    }
    for key, spec in of_the_trainer.items():
        if is_dotted_path(spec):
            found.append(NamedFunction(f"{key} = {spec}", partial(check_module, spec, kind=key)))
    return found


def _import(function: NamedFunction) -> Iterator[Finding]:
    function.load()
    yield Finding("functions", "ok", function.key)


# -- the process ----------------------------------------------------------------------------------


def serve() -> None:
    stages, extent, skip, path, *overrides = sys.argv[1:]
    follow_owner()
    # what the user's code prints must not get between the lines
    out = os.dup(1)
    os.dup2(2, 1)

    def write(line: dict[str, Any]) -> None:
        os.write(out, orjson.dumps(line) + b"\n")

    quick = extent == "quick"
    config, _ = inspect_config(find_config(Path(path)), overrides)
    if quick and stages != "functions":
        config = fetch(config)  # which the parent has downloaded
    units = [u for stage in stages.split(",") for u in units_of(stage, config, quick=quick)]
    for number, unit in list(enumerate(units))[int(skip) :]:
        write({"begins": number, "section": unit.section, "what": unit.what,
               "waits_s": unit.waits_s})  # fmt: skip
        for finding in unit.findings():
            write(asdict(finding))
    write({"done": True})


# -- its parent -----------------------------------------------------------------------------------


def run_units(
    stages: Sequence[str], command: Sequence[str], *, quick: bool = False
) -> Iterator[Finding]:
    """Yield the findings of stages; `command`: the config's path and the overrides."""
    skip: int | None = 0
    while skip is not None:
        arguments = [",".join(stages), "quick" if quick else "all", str(skip), *command]
        skip = yield from _run_process(stages[0], arguments)


def _run_process(section: str, arguments: Sequence[str]) -> Generator[Finding, None, int | None]:
    """Yield what a process finds; return the unit to continue with, or None at the end."""
    start: Line = {"section": section, "what": "its imports"}
    unit = start
    with tempfile.TemporaryFile() as errors, _start(arguments, errors) as process:
        try:
            while line := _next_line(process, _limit_s(unit)):
                if "done" in line:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(EXIT_S)  # it removes its scratch files
                    return None
                if "begins" in line:
                    unit = line
                else:
                    yield Finding(**line)
            what = f"{unit['what']}: {_end(process, unit)}"
            yield Finding(unit["section"], "error", what, _last_line(errors))
        finally:
            kill_session(process.pid)
    return None if unit is start else unit["begins"] + 1


def _start(arguments: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rolloutmq.check", *arguments],
        env=os.environ | {OWNER: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )


def _limit_s(unit: Line) -> float:
    return LIMIT_S + unit["waits_s"] if "begins" in unit else START_S


def _next_line(process: subprocess.Popen[bytes], limit_s: float) -> Line | None:
    """Return the next line; None if the process ended, or was killed at its limit."""
    assert process.stdout is not None
    timer = threading.Timer(limit_s, kill_session, [process.pid])
    timer.daemon = True
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    parsed: Line | None = orjson.loads(line) if line.endswith(b"\n") else None
    return parsed


def _end(process: subprocess.Popen[bytes], unit: Line) -> str:
    code = process.wait()
    if code == -signal.SIGKILL:
        return f"no end within {_limit_s(unit):g} s, or it was killed for its memory"
    return f"it ended the process that checked it ({how_ended(code)})"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f"it printed last: {lines[-1].strip():.200}" if lines else ""
