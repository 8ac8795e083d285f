"""`rolloutmq server`, `janitor`, `acl`, `scripts` and `key`: the server and its users."""

from __future__ import annotations

import logging
import re
import secrets
import threading
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from buffer.errors import ConfigError, StoreUnavailable
from buffer.ids import valid_name
from buffer.janitor import Swept
from buffer.limits import SCHEMA
from buffer.redis.keys import Keys
from buffer.redis.script_contract import Slot
from buffer.redis.scripts import Script, library, sources
from buffer.redis.server.acl import ROLES, acl_line, user_name
from buffer.run import Run
from rolloutmq.command_list import command
from rolloutmq.hang_up import stop_at_signals
from rolloutmq.options import AsJson, Output, RunDir, Target, embedded_server, newest_server, on_run
from rolloutmq.output import console, emit, emit_line, facts, plural, table

log = logging.getLogger("rolloutmq.janitor")


@command("Administration", "janitor", epilog="Example: rolloutmq janitor --run demo --every 0.5")
@on_run
def janitor(
    target: Target,
    once: Annotated[
        bool, typer.Option("--once", help="Exit once there is nothing left to do.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.001, help="Seconds between two sweeps.")] = 1.0,
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
        (swept.media, "folder", "of ended groups deleted"),
    )
    return ", ".join(f"{plural(number, what)} {done}" for number, what, done in parts if number)


SERVER_EPILOG = (
    "Example: rolloutmq server --run-dir runs/demo && rolloutmq status --run-dir runs/demo"
)


@command("Administration", "server", epilog=SERVER_EPILOG)
def server(
    stop: Annotated[bool, typer.Option("--stop", help="Stop it; its data stays on disk.")] = False,
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


PASSWORD_BYTES = 32


@command(
    "Administration",
    "acl",
    epilog="Example: rolloutmq acl --run demo --secrets demo.secrets >> /etc/redis/users.acl",
)
def acl(
    run: Annotated[
        str, typer.Option("--run", metavar="NAME", help="Name of the run, which need not exist.")
    ],
    secrets_file: Annotated[
        Path,
        typer.Option(
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
    passwords = _from_file(secrets_file)
    lines = {role: acl_line(run, role, passwords[role]) for role in ROLES}
    if as_json:
        emit({user_name(run, role): line for role, line in lines.items()})
    else:
        typer.echo("\n".join(lines.values()))


def _from_file(path: Path) -> dict[str, str]:
    """Read the passwords of a file, after adding missing ones; only its owner may read it."""
    passwords = _read(path) if path.exists() else {}
    if missing := [role for role in ROLES if role not in passwords]:
        passwords |= {role: secrets.token_urlsafe(PASSWORD_BYTES) for role in missing}
        path.touch(mode=0o600)
        path.write_text("".join(f"{role} {passwords[role]}\n" for role in ROLES), encoding="utf-8")
    return passwords


def _read(path: Path) -> dict[str, str]:
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


# scripts that a worker calls; --json names their keys
OF_A_WORKER = ("register", "heartbeat", "reconcile", "claim", "submit", "release", "deregister")


@command("Administration", "scripts", epilog="Example: rolloutmq scripts --json > scripts.json")
def scripts(as_json: AsJson = False) -> None:
    """List the Lua scripts, one per state change.

    With --json: source, SHA1, keys and arguments of each, which is what a client in another
    language needs. Keys of a worker's scripts are given without their prefix rmq:{RUN}:
    """
    if as_json:
        emit(
            {
                "schema": SCHEMA,
                "scripts": {name: _as_json(script) for name, script in library().items()},
            }
        )
        return
    grid = table("script", "SHA1", "arguments")
    for name, script in library().items():
        grid.add_row(name, script.sha, " ".join(script.header.fixed("ARGV")))
    console().print(grid)


def _as_json(script: Script) -> dict[str, Any]:
    slots = {
        array: [_slot(slot) for slot in script.header.slots if slot.array == array]
        for array in ("KEYS", "ARGV")
    }
    if script.name in OF_A_WORKER:
        for slot in slots["KEYS"]:
            if not slot["tail"]:
                slot["key"] = _key(slot["names"][0])
    after_shebang = sources()[script.name].splitlines()[1:]
    contract = [
        line.removeprefix("-- ")
        for line in takewhile(lambda line: line.startswith("-- "), after_shebang)
    ]
    return {
        "sha": script.sha,
        "keys": slots["KEYS"],
        "args": slots["ARGV"],
        "contract": contract,
        "source": script.source,
    }


def _key(slot: str) -> str:
    """Return a key without `rmq:{RUN}:`, with `<task>` and `<worker>` as placeholders."""
    keys = Keys("any")
    return keys.slots(task="<task>", worker="<worker>")[slot].removeprefix(keys.prefix)


def _slot(slot: Slot) -> dict[str, Any]:
    """Describe a slot of KEYS or ARGV; a `tail` takes any number of values, within the contract.

    `default` is the value to pass for "none"; `defaults`: of each name in a tail.
    """
    document: dict[str, Any] = {"names": slot.names, "types": slot.types, "tail": slot.is_tail}
    if slot.array == "ARGV":
        defaults = [_default(kind) for kind in slot.types]
        if slot.is_tail:
            document["defaults"] = defaults
        elif defaults[0] is not None:
            document["default"] = defaults[0]
    return document


def _default(kind: str) -> str | None:
    if "''" in kind.split("|"):
        return ""
    return "0" if kind == "number" or kind.startswith("0..") else None
