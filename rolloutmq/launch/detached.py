"""`rolloutmq run --detach`: start a run in the background, and return once it is under way."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from rolloutmq.run_owner import Stage, read_record

POLL_S = 0.3
"""Seconds between two looks at the new process."""


def start_detached(command: list[str], folder: Path, screen: Console, *, where: str) -> int:
    """Start `rolloutmq run` with `command` in a session of its own, and print what it prints.

    Returns 0 once trainer, producer and a worker have joined the run, or on Ctrl-C; else the exit
    code of a run that ended before. `where`: the options by which other commands find the run.
    """
    log = folder / "logs" / "run.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name("run.log.1"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rolloutmq", "run", *command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        code = _follow(process, log, folder, screen)
    except KeyboardInterrupt:
        code = 0
    if code == 0 and process.poll() is None:
        _explain(screen, process.pid, folder, where)
    return code


def _follow(process: subprocess.Popen[bytes], log: Path, folder: Path, screen: Console) -> int:
    """Print the log of a new run until it is under way or has ended; return its exit code."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        while True:
            code = process.poll()
            record = read_record(folder)
            for line in lines:
                screen.print(line.rstrip("\n"), soft_wrap=True)
            if code is not None:
                return code if code >= 0 else 1
            if record and record.pid == process.pid and record.stage is Stage.RUNNING:
                return 0
            time.sleep(POLL_S)


def _explain(screen: Console, pid: int, folder: Path, where: str) -> None:
    """Print how to watch and stop a run that continues in the background."""
    screen.print(f"\nthe run continues in the background (process {pid}):")
    commands = {
        f"rolloutmq top {where}": "watch it live",
        f"rolloutmq logs -f --run-dir {folder}": "follow the logs of its processes",
        f"rolloutmq stop --run-dir {folder}": "stop it in order; the same run command continues it",
    }
    width = max(map(len, commands))
    for command, what in commands.items():
        screen.print(f"  {command:<{width}}  {what}", soft_wrap=True)
