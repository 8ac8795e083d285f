"""Every kind of process is killed in the middle of a run; the account and the weights come out the same."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from tests.pipeline.site import DEADLINE_S, ROOT, Site
from tests.pipeline.train_and_die import KILLED, POINTS


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_is_lost_or_trained_twice_when_each_kind_of_process_is_killed(make_site: Callable[..., Site]) -> None:
    """Its weights come through Redis; in all other tests they lie in a folder."""
    site = make_site(steps=24)
    text = site.config.read_text(encoding="utf-8").replace("[policy]", '[policy]\nweights_transport = "redis"')
    site.config.write_text(text, encoding="utf-8")
    site.server.start()
    trainer, producer = site.start("train"), site.start("producer")
    workers = [site.start("worker", "--id", name) for name in ("w0", "w1")]

    site.until_step(3)
    assert workers[0].end(signal.SIGKILL) == -signal.SIGKILL
    workers[0] = site.start("worker", "--id", "w0")
    site.until_step(7)
    assert producer.end(signal.SIGKILL) == -signal.SIGKILL
    site.start("producer", "--take-over")
    site.until_step(11)
    assert trainer.end(signal.SIGKILL) == -signal.SIGKILL
    before = len(site.lines())
    trainer = site.start("train", "--take-over")
    site.until(lambda: len(site.lines()) > before + 3, "a step after the restart")
    site.server.kill()
    site.server.start()

    assert trainer.wait() == 0, trainer.said()
    for process in site.processes[-1:] + workers:
        assert process.wait() == 0, process.said()
    assert not (site.run_dir / "weights").exists()
    site.check()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_weights_are_those_of_an_undisturbed_run_when_the_trainer_dies_at_every_line(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    """Killed after take, train, pause, publish, log, checkpoint and commit: the same batches, the same bits."""
    site = make_site(steps=10, token_s=0.001)
    text = site.config.read_text(encoding="utf-8").replace("checkpoint_every_steps = 3", "checkpoint_every_steps = 2")
    site.config.write_text(text, encoding="utf-8")
    site.server.start()
    site.start("producer")
    site.start("worker")
    batches = tmp_path / "batches"
    batches.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.train_and_die", str(site.config), str(batches)],
        cwd=ROOT,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    report = orjson.loads(done.stdout)
    assert report["exits"] == [KILLED] * (len(POINTS) - 1) + [0], done.stderr.decode()[-3000:]
    assert report["moved"] > 1e-3
    assert report["differs"] == 0.0
    site.check()
