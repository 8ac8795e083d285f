"""The example of a loop that calls the parts one by one, as its user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_loop_of_ones_own_calls_the_parts_one_by_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.own_loop", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == [
        f"step {n}: 4 groups" for n in (1, 2, 3, 4)
    ]
    assert (tmp_path / "checkpoint.npy").exists()
