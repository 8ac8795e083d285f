"""Passwords must not reach a log, a screen or an error message: URLs are masked before they are shown."""

from __future__ import annotations

import re

# Greedy up to the last "@": a password may hold unescaped ":" and "@", and masking too much is the safe side.
# A URL whose scheme was forgotten or mistyped holds one, too.
_USER_INFO = re.compile(r"([^:@/\s'\"]*):(?!//)[^\s'\"]*@")
# An "@" behind the name of a password may end the user information, or stand in that password.
_NAMED = r"[?&](?:password|ssl_password|sentinel_password)="
_BOTH = re.compile(rf"([^:@/\s'\"]*):(?!//)[^\s'\"]*{_NAMED}[^\s'\"]*@[^\s'\"]*", re.IGNORECASE)
_QUERY = re.compile(rf"({_NAMED})[^&\s'\"]+", re.IGNORECASE)


def mask_url(text: str) -> str:
    """The text with every password of a URL in it replaced by `***`."""
    return _QUERY.sub(r"\1***", _USER_INFO.sub(r"\1:***@", _BOTH.sub(r"\1:***", text)))
