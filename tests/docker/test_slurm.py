from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from rolloutmq.config.small_model import TinyModelConfig
from rolloutmq.extensions.demo.tiny_model import build_tiny_model

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400

CONFIG = """
run = { name = "drill" }
plan = { steps = 4, batch_size = 4 }
policy = { model = "model", max_staleness = 100 }
trainer = { loop = "drill_loop:train" }
engine = { kind = "simulated", response_tokens = { shape = "fixed", value = 4 } }
[tasks.sums]
prompt_repeat_k = 2
judge = "gsm8k"
sample = { max_tokens = 8 }
dataset = { kind = "jsonl", path = "sums.jsonl" }
"""

LOOP = '''
"""Take the batches of a run, commit each, and stop for good in the middle of the first life."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from buffer.weights.shared_folder import FolderSender
from consumer.handle.publication import publish
from buffer.ledger.position import Position
from consumer.handle.rollout_consumer import RolloutConsumer
from consumer.handle.checkpoint import CheckpointFolder


def train(run, config, model_dir, *, take_over=False):
    checkpoints = CheckpointFolder(config.run.folder / "checkpoints")
    steps = checkpoints.steps()
    position = checkpoints.read(steps[-1]) if steps else Position()
    consumer = RolloutConsumer(run)
    consumer.open(position=position, take_over=take_over)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    try:
        take(run, config, model_dir, consumer, checkpoints, position)
    finally:
        consumer.close()


def take(run, config, model_dir, consumer, checkpoints, position):
    if position.step:
        consumer.commit(position.step, keep=1)
    sender = FolderSender(config.run.folder / "weights")
    save = lambda folder: shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    publish(consumer, sender, position.step, save, pause=config.policy.pause_mode)
    while len(run.fleet.workers()) < 3:
        time.sleep(0.1)
    for step in range(position.step + 1, 5):
        batch = consumer.take_batch(step, {"sums": 4})
        position.add(batch.manifest)
        checkpoints.write(position, lambda folder: None)
        consumer.commit(step, keep=1)
        with Path("steps").open("a") as log:
            log.write(f"{step} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
        while step == 2 and not Path("second_life").exists():
            time.sleep(0.1)
    consumer.finish()
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A project's folder as the job expects it."""
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    python = f'#!/bin/sh\nexec "{sys.executable}"'
    for name, line in (("python", '"$@"'), ("rolloutmq", '-m rolloutmq "$@"')):
        (binaries / name).write_text(f"{python} {line}\n")
    shutil.copy(Path(__file__).parent / "fake_srun.py", binaries / "srun.py")
    (binaries / "srun").write_text(f'{python} "{binaries}/srun.py" "$@"\n')
    # the cluster's name service is not that of this host
    (binaries / "hostname").write_text("#!/bin/sh\necho 127.0.0.1\n")
    for binary in binaries.iterdir():
        binary.chmod(0o755)
    (tmp_path / "docker").mkdir()
    shutil.copy(ROOT / "docker" / "redis.conf", tmp_path / "docker")
    (tmp_path / "drill.toml").write_text(CONFIG)
    (tmp_path / "drill_loop.py").write_text(LOOP)
    rows = [{"question": f"{n} + 1 = ?", "answer": f"#### {n + 1}"} for n in range(99)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_tiny_model(tmp_path / "model", TinyModelConfig(), 1)
    return tmp_path


@contextmanager
def job(site: Path) -> Iterator[subprocess.Popen[str]]:
    of_slurm = {
        "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_CPUS_ON_NODE": "8", "SLURM_GPUS_ON_NODE": "2", "SLURMD_NODENAME": "node0",
    }  # fmt: skip
    environment = os.environ | of_slurm | {"CONFIG": "drill.toml", "PYTHONPATH": f"{ROOT}:{site}"}
    environment.pop("REDIS_URL", None)
    with (site / "job.log").open("a") as log:
        started = subprocess.Popen(
            ["bash", ROOT / "docker" / "slurm" / "run.sh"],
            cwd=site, env=environment, stdout=log, stderr=log, text=True,
        )  # fmt: skip
    children = psutil.Process(started.pid)
    try:
        yield started
    finally:
        for process in (
            [*children.children(recursive=True), children] if started.poll() is None else []
        ):
            process.kill()
        started.wait()


def steps(site: Path) -> list[str]:
    log = site / "steps"
    return log.read_text().splitlines() if log.exists() else []


def wait_for_steps(site: Path, number: int, started: subprocess.Popen[str]) -> None:
    end = monotonic() + DEADLINE_S
    while len(steps(site)) < number:
        assert started.poll() is None, (site / "job.log").read_text()
        assert monotonic() < end, (site / "job.log").read_text()
        sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_job_that_reaches_its_time_limit_is_continued_by_the_next(site: Path) -> None:
    with job(site) as first:
        wait_for_steps(site, 2, first)
        tree = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGTERM)
        assert first.wait(DEADLINE_S) == 143, (site / "job.log").read_text()
        assert not psutil.wait_procs(tree, timeout=400)[1]
    url = (site / "runs/server/url").read_text()
    assert (site / "runs/server/url").stat().st_mode & 0o077 == 0
    (site / "second_life").touch()
    with job(site) as second:
        assert second.wait(DEADLINE_S) == 0, (site / "job.log").read_text()
    asked = json.loads((site / "srun.json").read_text())
    assert (asked["nodes"], asked["ntasks"], asked["cpus_per_task"]) == (1, 2, 4)
    assert asked["exclude"] == "node0"
    assert steps(site) == [f"{step} 0" for step in (1, 2, 3, 4)]
    assert (site / "runs/server/url").read_text() != url  # another free port
