"""Who may ask what listens on HTTP: this machine, and elsewhere only who has the token."""

from __future__ import annotations

import ipaddress
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from buffer.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """The name in a header `Host: NAME[:PORT]`, without brackets; "" where there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return "?"


def carries(token: str, authorization: str) -> bool:
    """Whether a header `Authorization: Bearer TOKEN` holds the token; takes as long for a wrong one."""
    return secrets.compare_digest(authorization.removeprefix("Bearer ").encode(), token.encode())


def read_token(path: Path) -> str:
    """The token in a file. ConfigError where there is none."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token in {path} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"{path} holds no token", hint="for example: openssl rand -hex 16 > token")
    return token
