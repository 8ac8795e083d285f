"""`rolloutmq run` with several trainer ranks: one is killed, all stop, fewer continue."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest

from tests.pipeline.site import Process, Site


def rank_of(launcher: Process, rank: int) -> psutil.Process:
    """Return the process of a rank of the trainer."""
    found = [
        child
        for child in psutil.Process(launcher.popen.pid).children()
        if child.environ().get("RANK") == str(rank)
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_survives_a_killed_rank_and_continues_with_fewer(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(steps=14)
    two = ("run", "--set", "launch.trainer_ranks=2")
    first = site.start(*two)
    site.until_step(3)
    rank_of(first, 1).kill()
    site.until(lambda: "trainer restarted" in first.said(), "a restart of all ranks")
    assert "trainer rank 1 was killed by SIGKILL" in first.said()
    reached = max(step for step, _ in site.lines())
    site.until_step(reached + 2)
    assert first.end(signal.SIGINT) == 130, first.said()
    # both ranks ended in order, and rank 0 wrote a checkpoint of its last step
    last = max(step for step, _ in site.lines())
    assert (site.run_dir / "checkpoints" / f"step-{last:06d}" / "trainer.json").exists()

    code, output = site.command("run")
    assert code == 0, output + site.words()
    assert f"continues: step {last} is committed" in output
    assert "account: lost 0 · in two places 0 · trained twice 0" in output
    site.check()
