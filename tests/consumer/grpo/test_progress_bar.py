from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[3]

PROGRAM = """
import logging
from rolloutmq.process_log import log_json
from consumer.grpo.reporting.metric_writers import ProgressBar
from consumer.grpo.reporting.metric_writers import ProgressBar
log_json("trainer", "demo")
bar = ProgressBar(2, 5)
for step in (3, 4, 5):
    bar.write(step, {"rewards/mean": step / 10})
    if step == 4:
        logging.getLogger("rolloutmq.trainer").warning("between two steps")
bar.close()
"""


def test_a_terminal_shows_how_far_training_is_and_log_lines_stay_whole_above_it() -> None:
    master, slave = pty.openpty()
    env = os.environ | {"COLUMNS": "300", "TERM": "xterm"}
    subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, stderr=slave, timeout=400, check=True
    )
    os.close(slave)
    shown = b""
    with suppress(OSError):  # Linux reports a closed other end like this
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    text = shown.decode()
    assert "5/5" in text
    assert "reward 0.500" in text
    (line,) = [line for line in text.splitlines() if "between two steps" in line]
    assert line.rstrip().endswith('"message":"between two steps"}')
