"""The notebook runs from its first cell to its last, in a process that knows only the package."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from buffer.redis.server.embedded import EmbeddedServer

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "tour.ipynb"


def code() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


@pytest.mark.slow
def test_the_notebook_learns_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text(code(), encoding="utf-8")
    env = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path)}
    output = tmp_path / "output"
    with output.open("w") as stream:  # not a pipe, which its workers would keep open
        cells = subprocess.Popen(
            [sys.executable, "cells.py"],
            cwd=tmp_path,
            env=os.environ | env,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            cells.wait(400)
        finally:
            ended = cells.poll()
            if ended != 0:
                os.killpg(cells.pid, signal.SIGKILL)
            for folder in tmp_path.glob("rolloutmq-tour-*/server"):
                EmbeddedServer(folder).stop()
    text = output.read_text(encoding="utf-8")
    assert ended == 0, text
    first, last = re.findall(r"^step \d+: reward ([\d.]+)", text, re.M)
    assert float(first) < 0.5 < 0.8 < float(last)
    assert "lost: 0 in two places: 0 clean: True" in text
