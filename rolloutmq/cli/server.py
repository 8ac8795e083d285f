"""`rolloutmq server`, `janitor` and `acl`: the server and its users."""

from __future__ import annotations

import logging
import re
import secrets
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from buffer.errors import ConfigError, StoreUnavailable
from buffer.ids import valid_name
from buffer.janitor import Swept
from buffer.redis.server.acl import ROLES, acl_line, user_name
from buffer.run.run import Run
from rolloutmq.command_list import command
from rolloutmq.hang_up import stop_at_signals
from rolloutmq.options import AsJson, Output, RunDir, Target, embedded_server, newest_server, on_run
from rolloutmq.output import console, emit, emit_line, facts, plural

log = logging.getLogger("rolloutmq.janitor")


@command("janitor", epilog="Example: rolloutmq janitor --run demo --every 0.5")
@on_run
def janitor(
    target: Target,
    once: Annotated[bool, Option("--once", help="Exit once there is nothing left to do.")] = False,
    every: Annotated[float, Option(min=0.001, help="Seconds between two sweeps.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Revoke expired leases, expire old groups, free unused data.

    Workers and the producer do the same while they are alive; this is for the time when they are
    not, and it may run beside them. It continues after an outage of the server; SIGTERM stops it.
    It sweeps at least four times per lease: after a longer gap, which may have been an outage, no
    lease is revoked for a while.
    """
    sweep_on(target.run, stop_at_signals(), every, once=once, as_json=as_json)


def sweep_on(run: Run, stop: threading.Event, every_s: float, *, once: bool, as_json: bool) -> None:
    """Sweep until `stop` is set or, with `once`, until nothing is left; print what was done."""
    round_s = min(every_s, run.limits.lease_ms / 4000)
    is_unreachable = False
    while not stop.is_set():
        try:
            swept = run.janitor.sweep()
        except StoreUnavailable as error:
            if once:
                raise
            if not is_unreachable:
                log.warning("nothing can be swept: %s", error)
            is_unreachable = True
            continue
        is_unreachable = False
        is_done = not (swept.has_more or swept.grace_ms)
        if done := describe(swept):
            emit_line(asdict(swept)) if as_json else console().print(done)
        if once and is_done:
            return
        if not swept.has_more:
            stop.wait(round_s)


def describe(swept: Swept) -> str:
    """Return in words what a sweep did; "" for nothing."""
    parts = (
        (swept.reaped, "group", "revoked from silent workers"),
        (swept.buried, "group", "dead after too many tries"),
        (swept.gone_workers, "worker", "removed"),
        (swept.expired, "group", "expired"),
        (swept.forgotten, "archived batch", "no longer retained"),
        (swept.freed, "payload", "freed"),
        (swept.columns, "folder", "of ended groups deleted"),
    )
    return ", ".join(f"{plural(number, what)} {done}" for number, what, done in parts if number)


SERVER_EPILOG = (
    "Example: rolloutmq server --run-dir runs/demo && rolloutmq status --run-dir runs/demo"
)


@command("server", epilog=SERVER_EPILOG)
def server(
    stop: Annotated[bool, Option("--stop", help="Stop it; its data stays on disk.")] = False,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Start or stop the embedded server of a run.

    `rolloutmq run` starts it by itself, and the commands that look at an ended run do so for as
    long as they need it. This keeps it up until --stop, and prints how to reach it with redis-cli.
    """
    found = newest_server() if run_dir is None else (embedded_server(run_dir), run_dir)
    embedded, folder = found or (None, None)
    if embedded is None:
        where = "no folder under ./runs" if run_dir is None else str(run_dir)
        raise ConfigError(
            f"{where} has {'an' if run_dir is None else 'no'} embedded server",
            hint="pass --run-dir FOLDER; `rolloutmq run CONFIG` creates one",
        )
    embedded.stop() if stop else embedded.start()
    document = {"run_dir": str(folder), "url": embedded.url, "running": embedded.is_running}
    rows = [("server of", str(folder)), ("url", embedded.url), ("redis-cli", embedded.cli)]
    shown = facts([*rows, ("pid", str(embedded.pid))])
    stopped = f"the server of {folder} is stopped; its data is on disk"
    answer = Output(document | {"pid": embedded.pid}, stopped if stop else shown)
    answer.print(as_json=as_json)


@command(
    "acl", epilog="Example: rolloutmq acl --run demo --secrets demo.secrets >> /etc/redis/users.acl"
)
def acl(
    run: Annotated[
        str, Option("--run", metavar="NAME", help="Name of the run, which need not exist.")
    ],
    secrets_file: Annotated[
        Path,
        Option(
            "--secrets",
            metavar="FILE",
            help="File with `role password` lines; missing passwords are generated and added.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Print users for the server's ACL file, one per role.

    Only hashes of their passwords are printed. Load the users with `ACL LOAD`; clients put user
    and password into REDIS_URL.
    """
    valid_name("run", run)
    passwords = _read(secrets_file) if secrets_file.exists() else {}
    if missing := [role for role in ROLES if role not in passwords]:
        passwords |= {role: secrets.token_urlsafe(32) for role in missing}
        secrets_file.touch(mode=0o600)
        lines = "".join(f"{role} {passwords[role]}\n" for role in ROLES)
        secrets_file.write_text(lines, encoding="utf-8")
    users = {user_name(run, role): acl_line(run, role, passwords[role]) for role in ROLES}
    if as_json:
        emit(users)
    else:
        typer.echo("\n".join(users.values()))


def _read(path: Path) -> dict[str, str]:
    """Read the passwords of a file, which only its owner may read."""
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} is readable by other users", hint=f"chmod 600 {path}")
    passwords = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        role, _, password = line.partition(" ")
        # the line is not quoted: it may contain a password
        if role not in ROLES or not re.fullmatch(r"\S{8,512}", password):
            raise ConfigError(
                f"{path}:{number} is not a role and a password of 8 characters or more",
                hint=f"roles are {', '.join(ROLES)}",
            )
        passwords[role] = password
    return passwords
