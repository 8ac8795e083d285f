"""Every kind of process is killed in the middle of a run, and the account adds up."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.pipeline.site import Site


@pytest.mark.slow
def test_nothing_is_lost_or_trained_twice_when_each_kind_of_process_is_killed(
    make_site: Callable[..., Site],
) -> None:
    """Its weights come through Redis; in all other tests they lie in a folder."""
    site = make_site(steps=24)
    text = site.config.read_text(encoding="utf-8").replace(
        "[policy]", '[policy]\nweights_transport = "redis"'
    )
    site.config.write_text(text, encoding="utf-8")
    site.server.start()
    trainer = site.start("train")
    producer = site.start("producer")
    worker = site.start("worker", "--id", "w0")

    site.until_step(3)
    assert worker.end(signal.SIGKILL) == -signal.SIGKILL
    worker = site.start("worker", "--id", "w0")
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

    assert trainer.wait() == 0, site.words()  # of all processes: the producer may be the cause
    assert worker.wait() == 0, worker.said()
    assert not (site.run_dir / "weights").exists()
    site.check()
