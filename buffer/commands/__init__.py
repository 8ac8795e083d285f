"""The operator's part of the `rolloutmq` command: look at a run, and steer it. One file per sub-command."""

from __future__ import annotations

import typer

from buffer.commands import (
    curate,
    dead,
    doctor,
    drop,
    fence,
    fsck,
    janitor,
    ls,
    metrics,
    pause,
    requeue,
    resume,
    save,
    scripts,
    server,
    settings,
    show,
    status,
    tail,
    top,
    workers,
)


def register(app: typer.Typer) -> None:
    """Add the sub-commands, in the order in which `--help` lists them."""
    looking = (status, top, ls, show, dead, requeue, drop, tail, workers, metrics)
    for command in (*looking, pause, settings, fence, save, resume, curate, janitor, fsck, doctor, server, scripts):
        command.register(app)
