from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import orjson
import psutil
import pytest

from rolloutmq.run_owner import Stage, read_record
from tests.pipeline.site import ROOT, Process, Site
from tests.rolloutmq.conftest import in_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BROKEN = """
def judge(*, response, ground_truth, state):
    raise ValueError("no verifier here")
"""
MENDED = """
def judge(*, response, ground_truth, state):
    return float(sum(map(ord, response)) % 2)
"""


@pytest.fixture
def site(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a site whose judge is the user's module `mine`, which raises."""
    made: Site = make_site(steps=2)
    monkeypatch.setenv("PYTHONPATH", str(made.folder))
    text = made.config.read_text(encoding="utf-8")
    made.config.write_text(text.replace("tests.pipeline.judges:by_chance", "mine:judge"))
    write_judge(made, BROKEN)
    return made


def write_judge(site: Site, source: str) -> None:
    (site.folder / "mine.py").write_text(source, encoding="utf-8")


def detail(site: Site) -> str:
    record = read_record(site.run_dir)
    return record.detail if record else ""


def read(site: Site, *words: str) -> Any:
    return orjson.loads(in_process(*words, "--json", "--run-dir", str(site.run_dir)).stdout)


def waits(site: Site) -> int:
    log = site.run_dir / "logs" / "trainer.log"
    return log.read_text(encoding="utf-8").count("the trainer waits") if log.exists() else 0


def run_on_terminal(site: Site) -> Process:
    """`rolloutmq run` on a terminal, whose output goes to the log."""
    master, slave = pty.openpty()
    log = site.folder / "terminal.log"
    words = [sys.executable, "-m", "rolloutmq", "run", str(site.config)]
    env = {k: v for k, v in os.environ.items() if k != "REDIS_URL"}
    popen = subprocess.Popen(
        words, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env=env | {"OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)

    def copy() -> None:
        with log.open("wb", buffering=0) as file:
            try:
                while data := os.read(master, 1 << 16):
                    file.write(data)
            except OSError:  # the last process that held the terminal has ended
                os.close(master)

    Thread(target=copy, daemon=True).start()
    site.processes.append(Process(popen, log))
    return site.processes[-1]


def test_a_run_waits_for_a_stopped_task_and_goes_on_with_the_mended_judge(site: Site) -> None:
    """It does so while its trainer is killed, too; the bell rings once."""
    process = run_on_terminal(site)
    site.until(lambda: "ValueError: no verifier here" in detail(site), "the reason in the record")
    assert read(site, "status")["stuck_on"] == ["sums"]
    assert "stuck" in [symptom["level"] for symptom in read(site, "doctor")["runs"]["site"]]

    launcher = psutil.Process(process.pid)
    (trainer,) = [child for child in launcher.children() if "train" in child.cmdline()]
    trainer.kill()
    site.until(lambda: waits(site) == 2, "another trainer that waits")
    write_judge(site, MENDED)
    where = ("--run-dir", str(site.run_dir))
    assert in_process("resume", "--task", "sums", *where).returncode == 0
    assert process.wait() == 0, site.words()
    assert process.log.read_bytes().count(b"\a") == 1
    assert detail(site) == ""
    site.check()


def test_a_run_that_waits_stops_in_order_or_ends_where_nobody_takes_care(site: Site) -> None:
    process = site.start_module("rolloutmq", "run", str(site.config))
    site.until(lambda: waits(site) == 1, "a trainer that waits")
    assert process.end(signal.SIGTERM) == 130, site.words()
    record = read_record(site.run_dir)
    assert record
    assert (record.stage, record.detail) == (Stage.STOPPED, "")

    words = ("run", str(site.config), "--exit-when-stuck")
    assert site.start_module("rolloutmq", *words).wait() == 5, site.words()
    record = read_record(site.run_dir)
    assert record
    assert record.stage is Stage.FAILED
    assert "task sums is stopped" in record.detail
    assert "no verifier here" in record.detail
    assert "rolloutmq resume --task sums" in record.detail
    assert not site.server.is_running
