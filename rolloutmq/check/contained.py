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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from buffer.imports import check_module, is_dotted_path
from producer_workers.follow_owner import OWNER, follow_owner, how_ended, kill_session
from producer_workers.user_functions import named_functions
from rolloutmq.check.finding import Finding, Unit
from rolloutmq.config.config import Config
from rolloutmq.config.load import inspect_config
from rolloutmq.config.sources import fetch
from rolloutmq.presets import find_config

STAGES = ("functions", "model", "data")
START_S = 600.0  # a process imports what its stage needs within this time
LIMIT_S = 300.0  # for one unit, beside the time that it expects to wait


def units_of(stage: str, config: Config, *, quick: bool = False) -> list[Unit]:
    """Return the units of a stage, or its quick ones: the same ones in every process."""
    if stage != "functions":  # a stage imports what it needs
        made: list[Unit] = import_module(f"rolloutmq.check.{stage}").units(config, quick=quick)
        return made
    found: dict[str, Any] = {each.key: each.load for each in named_functions(config)}
    of_the_trainer = {
        "[trainer] loop": config.trainer.loop or "",
        "[trainer] advantages": config.trainer.advantages,
        "[learner.loss] objective": config.learner.loss.objective,
    }
    for key, spec in of_the_trainer.items():
        if is_dotted_path(spec):
            found[f"{key} = {spec}"] = partial(check_module, spec, kind=key)

    def load(key: str) -> Iterator[Finding]:
        found[key]()
        yield Finding("functions", "ok", key)

    return [Unit("functions", key, partial(load, key)) for key in found]


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


def run_units(
    stages: Sequence[str], command: Sequence[str], *, quick: bool = False
) -> Iterator[Finding]:
    """Yield the findings of stages; `command`: the config's path and the overrides."""
    skip = 0
    while True:
        unit: dict[str, Any] = {"section": stages[0], "what": "its imports"}
        limit_s = START_S
        words = [",".join(stages), "quick" if quick else "all", str(skip), *command]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                [sys.executable, "-m", "rolloutmq.check", *words],
                env=os.environ | {OWNER: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            ) as process,
        ):
            try:
                while line := _next_line(process, limit_s):
                    if "done" in line:
                        with suppress(subprocess.TimeoutExpired):
                            # threads of user code may keep it; it removes its scratch files
                            process.wait(5.0)
                        return
                    if "begins" in line:
                        unit, limit_s = line, LIMIT_S + line["waits_s"]
                    else:
                        yield Finding(**line)
                what = f"it ended the process that checked it ({how_ended(process.wait())})"
                if process.returncode == -signal.SIGKILL:
                    what = f"no end within {limit_s:g} s, or it was killed for its memory"
                errors.seek(0)
                *_, last = ["", *errors.read().decode(errors="replace").strip().splitlines()]
                said = f"it printed last: {last.strip():.200}" if last else ""
                yield Finding(unit["section"], "error", f"{unit['what']}: {what}", said)
            finally:
                kill_session(process.pid)
        if "begins" not in unit:
            return
        skip = unit["begins"] + 1


def _next_line(process: subprocess.Popen[bytes], limit_s: float) -> dict[str, Any] | None:
    """Return the next line; None if the process ended, or was killed at its limit."""
    assert process.stdout is not None
    timer = threading.Timer(limit_s, kill_session, [process.pid])
    timer.daemon = True
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    parsed: dict[str, Any] | None = orjson.loads(line) if line.endswith(b"\n") else None
    return parsed
