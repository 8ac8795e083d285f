"""Programs and `rolloutmq` commands, forked from one process that has imported torch for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_context = get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest", "tests.consumer.grpo.learner.sharded_learner", "tests.consumer.handle.many_lives",
        "tests.consumer.handle.sharded_trainer", "consumer.grpo.trainer", "producer_workers.build",
        "rolloutmq.launch.launcher", "rolloutmq.launch.training", "rolloutmq.cli.processes",
        "tests.forked_commands",
    ]
)  # fmt: skip


def run_in_warm_process(folder: Path, program: Callable[..., None], *args: Any) -> str:
    """Run a program in a process of its own, and return what it printed; assert that it succeeds.

    A pytest process must not fork it: it has threads.
    """
    folder.mkdir(exist_ok=True)
    printed = folder / "printed"
    process = _context.Process(target=_run, args=(printed, program, *args))
    process.start()
    process.join()
    text = printed.read_text(encoding="utf-8")
    assert process.exitcode == 0, text[-4000:]
    return text


def start_program(program: Callable[..., None], *args: Any) -> BaseProcess:
    process = _context.Process(target=program, args=args)
    process.start()
    return process


def start_command(
    log: Path, words: list[str], environment: dict[str, str], folder: Path = ROOT
) -> BaseProcess:
    """Start a `rolloutmq` command in a folder; its output is added to a file."""
    log.touch()
    process = _context.Process(target=_run_command, args=(log, words, environment, folder))
    process.start()
    return process


def run_to_end(folder: Path, *words: str) -> str:
    """Run a `rolloutmq` command in a folder, and return its output; assert that it succeeds."""
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    log = folder / f"{words[0]}.log"
    process = start_command(log, list(words), environment | {"CUDA_VISIBLE_DEVICES": ""}, folder)
    process.join()
    said = log.read_text(encoding="utf-8")
    assert process.exitcode == 0, said
    return said


def _run_command(log: Path, words: list[str], environment: dict[str, str], folder: Path) -> None:
    # imported here, since pytest's process needs none of it
    from tests.forked_commands import run_command

    os.chdir(folder)
    run_command(log, words, environment)


def _run(printed: Path, program: Callable[..., None], *args: Any) -> None:
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    program(*args)
