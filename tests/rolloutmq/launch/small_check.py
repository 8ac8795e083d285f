"""The part of `rolloutmq gpu-check` that needs no GPU, as a program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import orjson

from rolloutmq.launch.gpu_check import measure
from tests.forked_commands import fork_commands


def main(folder: Path, overrides: list[str]) -> None:
    """Run two steps of the check below a folder; print its rows as the last line."""
    os.chdir(folder)
    fork_commands()
    rows = measure(2, overrides)
    sys.stdout.write(orjson.dumps(rows).decode() + "\n")
