"""`rolloutmq acl`: users of a run for the server's ACL file, one per role."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Annotated

import typer

from buffer.commands.screen import emit
from buffer.commands.target import AsJson
from buffer.errors import ConfigError
from buffer.keys import valid_name
from buffer.server.acl import ROLES, acl_line, user_name

EPILOG = "Example: rolloutmq acl --run demo --secrets demo.secrets >> /etc/redis/users.acl"

PASSWORD_BYTES = 32


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(acl)


def acl(
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run; it need not exist yet.")],
    secrets_file: Annotated[
        Path | None,
        typer.Option("--secrets", metavar="FILE", help="One `role password` per line; what is missing is made there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print users for the server's ACL file, one per role.

    With hashes of their passwords, which come from --secrets, or else from ROLLOUTMQ_PASSWORD_WORKER and so on. Load
    them with `ACL LOAD`; a client names user and password in REDIS_URL.
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
            hint="--secrets FILE makes them, or set ROLLOUTMQ_PASSWORD_" + missing[0].upper(),
        )
    return passwords


def _from_file(path: Path) -> dict[str, str]:
    """The passwords in a file, completed by new ones; only its owner may read it."""
    passwords = _read(path) if path.exists() else {}
    if missing := [role for role in ROLES if role not in passwords]:
        passwords |= {role: secrets.token_urlsafe(PASSWORD_BYTES) for role in missing}
        path.touch(mode=0o600)
        path.write_text("".join(f"{role} {passwords[role]}\n" for role in ROLES), encoding="utf-8")
    return passwords


def _read(path: Path) -> dict[str, str]:
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others than its owner", hint=f"chmod 600 {path}")
    passwords = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        role, _, password = line.partition(" ")
        # what stands there is never shown: it may be a password
        if role not in ROLES or not re.fullmatch(r"\S{8,512}", password):
            raise ConfigError(
                f"{path}:{number} is not a role and a password of 8 characters or more",
                hint=f"roles are {', '.join(ROLES)}",
            )
        passwords[role] = password
    return passwords
