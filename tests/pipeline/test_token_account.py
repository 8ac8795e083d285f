"""Each token that an engine sampled is in one row of the account, or in a stage (`check_tokens`).

That is checked at the end of every test of this folder whose workers have left. Here: a worker
that is killed, and one that comes back after it was given up.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from buffer.control.control import Mode
from tests import waits
from tests.pipeline.site import ROOT
from tests.pipeline.test_worker_contract import url_of
from tests.pipeline.yard import TASK, Yard


@pytest.mark.parametrize("made", [7, 25])
def test_what_a_killed_worker_had_reported_is_lost_to_the_token(
    yard: Yard, tmp_path: Path, made: int
) -> None:
    """It is killed when it has sampled `made` of 4 x 10 tokens, and has said so."""
    yard.enqueue(2)
    file = tmp_path / "tokens"
    words = [url_of(yard), yard.run.name, str(file), str(made)]
    command = [sys.executable, "-m", "tests.pipeline.counting_worker", *words]

    def account() -> dict[str, int]:
        return yard.run.account.tokens()[TASK].table

    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            waits.until(lambda: file.exists() and file.stat().st_size == made)
            waits.until(lambda: sum(account().values()) == made)
        finally:
            process.kill()
    done = account()
    yard.expire_lease("killed")
    assert file.stat().st_size == made == sum(account().values())
    assert account() == {**done, "running": 0, "lost": done["running"]}
    yard.check()


async def test_a_worker_that_was_given_up_and_comes_back_is_counted_once(yard: Yard) -> None:
    yard.enqueue(3, (50, 50))
    worker = yard.worker(held=True, partial_rollout=True)
    async with yard.working(worker) as engine:
        await yard.until_generating(engine, 6)
        yard.control(Mode.KEEP)
        yard.expire_lease("w0")
        yard.run.fleet.fence("w0")
        yard.control(Mode.RUN)
        await yard.until_generating(engine, 6)
        engine.let_go()
        await yard.until_stages(completed=3)
    assert yard.run.account.tokens()[TASK].table["lost"] > 0
    yard.check()
