"""`make setup` after one that was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.programs import ROOT, printed

MAKE_VENV = "import bootstrap; bootstrap.make_venv()"
INSTALLED = "import pip._internal.cli.main, sys; print(sys.prefix)"


@pytest.mark.slow
def test_a_venv_that_was_half_made_is_made_again(tmp_path: Path) -> None:
    """Python in it has no pip, or installs into the system's packages."""
    shutil.copy(ROOT / "bootstrap.py", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    command = [sys.executable, "-c", MAKE_VENV]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as making:
        while not python.exists():
            assert making.poll() is None
            time.sleep(0.001)
        os.killpg(making.pid, signal.SIGKILL)
    subprocess.run(command, cwd=tmp_path, check=True)
    assert printed(python, "-c", INSTALLED, cwd=tmp_path).strip() == str(python.parents[1])
