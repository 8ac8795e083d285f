"""Sources of trainers that are not on PyPI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLONES = Path(__file__).parents[2] / "build" / "trainers" / "sources"


def source_of(variable: str, url: str, commit: str) -> Path:
    """Return the folder of a project's sources, which can be imported from then on.

    It is the one that the environment variable names, or else a clone of this commit. Skips the
    module's tests where neither can be had.
    """
    folder = Path(os.environ.get(variable) or CLONES / f"{variable.lower()}-{commit[:9]}")
    if not folder.is_dir():
        if not os.environ.get("MAKELEVEL"):
            pytest.skip(f"run by make test-trainers, or with {variable}=…", allow_module_level=True)
        part = folder.with_suffix(".part")
        for command in (
            ["init", "-q", str(part)],
            ["-C", str(part), "fetch", "-q", "--depth", "1", url, commit],
            ["-C", str(part), "checkout", "-q", "FETCH_HEAD"],
        ):
            if subprocess.run(["git", *command], check=False).returncode:
                pytest.skip(f"{url} cannot be reached: set {variable}", allow_module_level=True)
        part.rename(folder)
    sys.path.insert(0, str(folder))
    return folder
