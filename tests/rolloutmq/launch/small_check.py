"""The part of `rolloutmq gpu-check` that needs no GPU, as a program."""

from __future__ import annotations

import os
from pathlib import Path

import orjson

from rolloutmq.launch.gpu_check import measure
from tests.forked_commands import fork_commands

STEPS = 2


def main(folder: Path, overrides: list[str]) -> None:
    """Run the check below a folder; write its rows to `rows.json` there."""
    os.chdir(folder)
    fork_commands()
    Path("rows.json").write_bytes(orjson.dumps(measure(STEPS, overrides)))
