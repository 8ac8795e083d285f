from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from producer_workers.follow_owner import OWNER

PROGRAM = """
import signal, sys
from producer_workers import follow_owner
follow_owner.ORPHAN_S = 0.2
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
follow_owner.follow_owner()
signal.pause()
"""


@pytest.mark.parametrize(
    ("flags", "ended_by"), [([], signal.SIGTERM), (["deaf"], signal.SIGKILL)], ids=["", "deaf"]
)
def test_a_process_whose_owner_is_gone_ends(flags: list[str], ended_by: signal.Signals) -> None:
    gone = str(os.getppid())
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *flags], env=os.environ | {OWNER: gone}
    )
    assert process.wait() == -ended_by
