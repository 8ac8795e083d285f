"""`rolloutmq acl` and `scripts`: print users for a server, and scripts for clients elsewhere."""

from __future__ import annotations

import os
import re
import secrets
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from buffer.errors import ConfigError
from buffer.model.ids import valid_name
from buffer.model.limits import SCHEMA
from buffer.redis.keys import Keys
from buffer.redis.script_contract import Slot
from buffer.redis.scripts import Script, library, sources
from buffer.redis.server.acl import ROLES, acl_line, user_name
from rolloutmq.console import console, plain
from rolloutmq.options import AsJson
from rolloutmq.output import emit, table

ACL_EPILOG = "Example: rolloutmq acl --run demo --secrets demo.secrets >> /etc/redis/users.acl"

PASSWORD_BYTES = 32


def register(app: typer.Typer) -> None:
    app.command(epilog=ACL_EPILOG)(acl)
    app.command(epilog=SCRIPTS_EPILOG)(scripts)


def acl(
    run: Annotated[
        str, typer.Option("--run", metavar="NAME", help="Name of the run, which need not exist.")
    ],
    secrets_file: Annotated[
        Path | None,
        typer.Option(
            "--secrets",
            metavar="FILE",
            help="File with `role password` lines; missing passwords are generated and added.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print users for the server's ACL file, one per role.

    Their passwords, of which only hashes are printed, come from --secrets, or from
    ROLLOUTMQ_PASSWORD_WORKER and so on. Load the users with `ACL LOAD`; clients put user and
    password into REDIS_URL.
    """
    valid_name("run", run)
    passwords = _from_file(secrets_file) if secrets_file else _from_environment()
    lines = {role: acl_line(run, role, passwords[role]) for role in ROLES}
    if as_json:
        emit({user_name(run, role): line for role, line in lines.items()})
        return
    for line in lines.values():
        typer.echo(line)


def _from_environment() -> dict[str, str]:
    passwords = {role: os.environ.get(f"ROLLOUTMQ_PASSWORD_{role.upper()}", "") for role in ROLES}
    if missing := [role for role, password in passwords.items() if not password]:
        raise ConfigError(
            f"no password for {', '.join(missing)}",
            hint="--secrets FILE generates them, or set ROLLOUTMQ_PASSWORD_" + missing[0].upper(),
        )
    return passwords


def _from_file(path: Path) -> dict[str, str]:
    """Return the passwords of a file, after adding missing ones; only its owner may read it."""
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


OF_A_WORKER = ("register", "heartbeat", "reconcile", "claim", "submit", "release", "deregister")
"""Scripts that a worker calls; --json names their keys."""

SCRIPTS_EPILOG = "Example: rolloutmq scripts --json > scripts.json"


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
        grid.add_row(plain(name), script.sha, plain(" ".join(script.header.fixed("ARGV"))))
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
    """Describe a slot of KEYS or ARGV.

    `tail` marks a slot that takes any number of values (of each name, in turn), within the bounds
    of the contract. `default` is the value to pass for "none", where there is one.
    """
    document: dict[str, Any] = {"names": slot.names, "types": slot.types, "tail": slot.is_tail}
    if slot.array == "ARGV" and not slot.is_tail:
        default = _default(slot.types[0])
        if default is not None:
            document["default"] = default
    return document


def _default(kind: str) -> str | None:
    if "''" in kind.split("|"):
        return ""
    return "0" if kind == "number" or kind.startswith("0..") else None
