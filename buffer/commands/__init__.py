"""The operator's part of the `rolloutmq` command: look at a run, and steer it. One file per sub-command."""

from __future__ import annotations

import typer

from buffer.commands import (
    acl,
    batch,
    curate,
    dead,
    doctor,
    drain,
    drop,
    fence,
    fsck,
    janitor,
    ls,
    metrics,
    pause,
    requeue,
    resume,
    runs,
    save,
    scripts,
    server,
    settings,
    show,
    status,
    tail,
    top,
    web,
    workers,
)


def register(app: typer.Typer) -> None:
    """Add the sub-commands, in the order in which `--help` lists them."""
    looking = (status, runs, top, ls, show, batch, dead, requeue, drop, tail, workers, web, metrics)
    steering = (pause, drain, settings, fence, save, resume, curate)
    for command in (*looking, *steering, janitor, fsck, doctor, server, scripts, acl):
        command.register(app)
