"""Programs that a test starts and waits for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(
    *words: str | Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with this process's environment and `environment`."""
    env = os.environ | environment
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def printed(*words: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Return the output of a program; assert that it succeeds."""
    done = run(*words, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(*words: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Return the output of a Python program; assert that it succeeds."""
    return printed(sys.executable, *words, cwd=cwd, **environment)


def build_wheel(source: Path, target: Path) -> Path:
    """Build the wheel of a source folder as `make wheel` does."""
    words = ("-m", "hatchling", "build", "-t", "wheel", "-d", target)
    python(*words, cwd=source, SOURCE_DATE_EPOCH="1750000000")
    return next(target.glob("*.whl"))


def files_of_git(*folders: str) -> list[Path]:
    listed = printed("git", "ls-files", "-co", "--exclude-standard", *folders).splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]
