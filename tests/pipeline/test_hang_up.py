"""A terminal closes: `rolloutmq run` and each process of it stop as after SIGTERM, and leave nothing."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from buffer.redis.store import Store
from rolloutmq.run_owner import Stage, read_record
from tests.pipeline.site import ROOT, Process, Site
from tests.pipeline.test_run_command import all_gone
from tests.pipeline.yard import LIMITS, Yard

pytestmark = pytest.mark.timeout(400)


def processes_of(process: Process) -> list[psutil.Process]:
    """All that a launcher has started, and its server, which is in a session of its own."""
    found: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    return found


def stopped_in_order(site: Site, started: list[psutil.Process]) -> None:
    record = read_record(site.run_dir)
    assert record
    assert record.stage is Stage.STOPPED, site.words()
    assert "lost 0" in record.account
    site.until(partial(all_gone, started), "the end of all processes")
    assert not site.server.is_running
    assert site.audit().clean
    # the trainer was asked, and wrote what it had trained
    assert site.history().steps[-1].step == site.held
    assert (site.run_dir / "checkpoints" / f"step-{site.held:06d}").is_dir()


def take_terminal() -> None:
    """Make stdin the terminal that controls this session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_run_stops_in_order_when_its_terminal_closes(make_site: Callable[..., Site]) -> None:
    site = make_site(steps=1000, held=2)
    master, slave = pty.openpty()
    popen = subprocess.Popen(
        [sys.executable, "-m", "rolloutmq", "run", str(site.config)],
        cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=take_terminal,
        env={k: v for k, v in os.environ.items() if k != "REDIS_URL"} | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(slave)
    process = Process(popen, site.folder / "none")
    process.log.touch()
    site.processes.append(process)
    os.set_blocking(master, False)

    def read_until_step() -> bool:
        with suppress(BlockingIOError):
            os.read(master, 1 << 16)
        return site.reached() == 2

    site.until(read_until_step, "step 2")
    started = processes_of(process)
    assert len(started) >= 4
    os.close(master)
    process.wait()
    stopped_in_order(site, started)


@pytest.mark.slow
def test_each_process_takes_a_hang_up_as_sigterm(make_site: Callable[..., Site]) -> None:
    site = make_site(steps=1000, held=2)
    site.server.start()
    trainer, producer, worker = (site.start(verb) for verb in ("train", "producer", "worker"))
    site.until_held()
    assert worker.end(signal.SIGHUP) == 130, worker.said()
    assert trainer.end(signal.SIGHUP) == 130, trainer.said()
    assert producer.end(signal.SIGHUP) == 130, producer.said()
    audit = site.audit()
    assert audit.clean
    assert audit.leases == 0


@pytest.mark.slow
def test_an_ignored_hang_up_stays_ignored(make_site: Callable[..., Site]) -> None:
    """As under nohup, and for what a run started under nohup starts."""
    site = make_site(steps=1000, held=1)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = site.start_module("rolloutmq", "run", str(site.config))
    finally:
        signal.signal(signal.SIGHUP, before)
    site.until_held()
    for each in [psutil.Process(process.pid), *processes_of(process)]:
        if "valkey" not in each.name():
            each.send_signal(signal.SIGHUP)
    site.reach(2)
    assert process.exit_code is None
    started = processes_of(process)
    assert process.end(signal.SIGTERM) == 130
    stopped_in_order(site, started)


# -- an id is of one worker ------------------------------------------------------


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    site = make_site()
    site.server.start()
    return site


@pytest.fixture
def yard(site: Site, tmp_path: Path) -> Iterator[Yard]:
    """Make the run that the site's workers find on its server."""
    with closing(Store(site.server.url, deadline_s=400.0)) as store:
        yield Yard(store, site.name, tmp_path, LIMITS.model_copy(update={"lease_ms": 60_000}))


def test_an_id_is_of_one_live_worker_until_another_takes_over(site: Site, yard: Yard) -> None:
    def pids() -> list[str]:
        return [str(worker.facts["pid"]) for worker in yard.run.fleet.workers()]

    first = site.start("worker", "--id", "w0")
    site.until(lambda: pids() == [str(first.pid)], "the first worker")
    second = site.start("worker", "--id", "w0")
    assert second.wait() != 0
    assert "w0" in second.said()
    assert "--take-over" in second.said()
    third = site.start("worker", "--id", "w0", "--take-over")
    site.until(lambda: pids() == [str(third.pid)], "the worker that took over")
    assert first.wait() != 0, "it was fenced"
    assert third.end(signal.SIGTERM) == 130
