"""Programs and `rolloutmq` commands, forked from one process that has imported torch for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_context = get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "tests.consumer.learner.sharded_learner",
        "tests.consumer.many_lives",
        "tests.consumer.sharded_trainer",
        "consumer.training.trainer",
        "producer_workers.build",
        "rolloutmq.launch.launcher",
        "rolloutmq.launch.training",
        "rolloutmq.commands.run.produce",
        "tests.forked_commands",
    ]
)


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


def start_command(log: Path, words: list[str], environment: dict[str, str]) -> BaseProcess:
    """Start a `rolloutmq` command whose output is added to a file."""
    log.touch()
    process = _context.Process(target=_run_command, args=(log, words, environment))
    process.start()
    return process


def _run_command(log: Path, words: list[str], environment: dict[str, str]) -> None:
    # imported here, since pytest's process needs none of it
    from tests.forked_commands import run_command

    run_command(log, words, environment)


def _run(printed: Path, program: Callable[..., None], *args: Any) -> None:
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    program(*args)
