"""Where programs that a model wrote are run: the values of `sandbox`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

BUBBLEWRAP = "bubblewrap"
"""Nothing but an interpreter: no files, no network, no environment, one process."""

WEAK = "weak"
"""Limits of time, memory and files, and otherwise what the user of the worker may."""


def is_url(text: str) -> bool:
    """Return whether a judge or a sandbox is a service at a URL."""
    return text.startswith(("http://", "https://"))


def check_name(sandbox: str) -> str:
    """Return `sandbox`. Raises ValueError where it is none."""
    if sandbox not in (BUBBLEWRAP, WEAK) and not is_url(sandbox):
        raise ValueError(f"expected {BUBBLEWRAP}, {WEAK} or a URL, not {sandbox!r}")
    return sandbox


Sandbox = Annotated[str, AfterValidator(check_name)]
