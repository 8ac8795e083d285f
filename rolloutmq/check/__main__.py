"""The process in which the units of a stage run, see `rolloutmq.check.contained`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from producer_workers.follow_owner import follow_owner
from rolloutmq.check.finding import findings_of, units_of
from rolloutmq.config.load import inspect_config


def main() -> None:
    stage, skip, path, *overrides = sys.argv[1:]
    follow_owner()
    # what the user's code prints must not get between the lines
    out = os.dup(1)
    os.dup2(2, 1)

    def write(line: dict[str, Any]) -> None:
        os.write(out, orjson.dumps(line) + b"\n")

    config, _ = inspect_config(Path(path), overrides)
    for number, unit in enumerate(units_of(stage, config)):
        if number < int(skip):
            continue
        write({"begins": number, "section": unit.section, "what": unit.what,
               "waits_s": unit.waits_s})  # fmt: skip
        for finding in findings_of(unit):
            write(asdict(finding))
    write({"done": True})


main()
