"""Run as a program: write a checkpoint, killed at its n-th disk operation, for every n.

argv: a folder to work in, and the step to write (30: a new one; 20: an existing one). Prints a JSON
list: after each kill, the steps that look complete, those of them that are, and what `clear`
leaves. Single-threaded, so that it may fork.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import orjson

from buffer.ledger.position import Position
from consumer.handle.checkpoint import CheckpointFolder

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def save(step: int, folder: Path) -> None:
    (folder / "model").mkdir()
    for name in (
        "model/config.json",
        "model/model.safetensors",
        "state-00000-of-00001.safetensors",
    ):
        (folder / name).write_text(f"{name} of {step}", encoding="utf-8")


def write(checkpoints: CheckpointFolder, step: int) -> None:
    checkpoints.write(
        Position(step=step, lineage="l", run="r", run_nonce="n"), lambda folder: save(step, folder)
    )


def is_whole(checkpoints: CheckpointFolder, step: int) -> bool:
    names = ("model/config.json", "model/model.safetensors", "state-00000-of-00001.safetensors")
    folder = checkpoints.path(step)
    texts = [
        (folder / name).read_text(encoding="utf-8") for name in names if (folder / name).exists()
    ]
    return checkpoints.read(step).step == step and texts == [f"{name} of {step}" for name in names]


def run_killed(checkpoints: CheckpointFolder, step: int, at: int) -> bool:
    """In a child that dies at event `at`; whether it came that far."""
    if child := os.fork():
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and str(checkpoints.folder) in str(args[0]):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    write(checkpoints, step)
    checkpoints.prune(2)
    os._exit(0)


def main(base: Path, step: int) -> None:
    outcomes, killed, at = [], True, 0
    while killed:
        at += 1
        checkpoints = CheckpointFolder(base / str(at))
        for old in (10, 20):
            write(checkpoints, old)
        killed = run_killed(checkpoints, step, at)
        steps = checkpoints.steps()
        whole = [s for s in steps if is_whole(checkpoints, s)]
        checkpoints.clear(after=steps[-1])
        left = sorted(path.name for path in checkpoints.folder.iterdir())
        outcomes.append({"killed": killed, "steps": steps, "whole": whole, "left": left})
        shutil.rmtree(checkpoints.folder)
    sys.stdout.buffer.write(orjson.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
