#!/usr/bin/env python
"""Slurm's `srun` on one host: refuse what a real one would misread, and start the tasks.

A count that is not given comes from the environment of the job, as in Slurm.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

options = argparse.ArgumentParser()
options.add_argument("--exact", action="store_true")
options.add_argument("--exclude", default="")
for name in ("nodes", "ntasks", "ntasks-per-node", "gpus-per-task", "cpus-per-task"):
    inherited = os.environ.get("SLURM_" + name.replace("-", "_").upper())
    options.add_argument("--" + name, type=int, default=int(inherited or 1))
options.add_argument("--mem")
options.add_argument("--kill-on-bad-exit")
options.add_argument("command", nargs=argparse.REMAINDER)
given = options.parse_args()
Path("srun.json").write_text(json.dumps(vars(given)))
free = int(os.environ["SLURM_NNODES"]) - len(given.exclude.split(","))
assert given.nodes <= free, "more nodes than are left"
assert given.ntasks <= given.nodes * given.ntasks_per_node, "more tasks than places"
assert given.cpus_per_task * given.ntasks_per_node <= int(os.environ["SLURM_CPUS_ON_NODE"])
tasks = [
    subprocess.Popen(
        given.command,
        env=os.environ
        | {"SLURM_PROCID": str(task), "CUDA_VISIBLE_DEVICES": str(task % given.ntasks_per_node)},
    )
    for task in range(given.ntasks)
]


def forward(number: int, frame: object) -> None:
    for task in tasks:
        task.send_signal(number)


signal.signal(signal.SIGTERM, forward)
sys.exit(max(abs(task.wait()) for task in tasks))
