"""`rolloutmq run --regenerate` on a server that lost half of the run, with a trainer that is killed."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import pytest

from buffer.redis.keys import Keys
from tests.pipeline.site import Site
from tests.pipeline.test_run_command import child

pytestmark = pytest.mark.timeout(400)


def lose(site: Site, seed: int) -> None:
    """Half of the keys of the run are gone, its settings among them."""
    chance = random.Random(seed)
    server = site.server
    server.start()
    with server.connect() as raw:
        keys = sorted(raw.scan_iter(Keys(site.name).pattern))
        gone = [key for key in keys if chance.random() < 0.5]
        raw.delete(*gone, Keys(site.name).meta, Keys(site.name).control)
        raw.set("rmq:{another}:meta", "theirs")
    server.stop()


@pytest.mark.slow
def test_half_evicted_run_is_made_again_once_and_ends_with_a_clean_account(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(steps=40)
    first = site.start("run")
    site.until_step(5)
    assert first.end(signal.SIGTERM) == 130
    reached = site.lines()[-1][0]
    lose(site, seed=3)
    code, output = site.command("run")
    assert code == 5, output
    assert "--regenerate" in output

    second = site.start("run", "--regenerate")
    site.until_step(reached + 2)
    assert f"from the checkpoint of step {reached}" in second.said()
    child(second, "train").kill()
    assert second.wait() == 0, site.words()
    assert "trainer restarted" in second.said()
    # a trainer that is started again clears nothing
    assert second.said().count("Cleared") == 1
    log = (site.run_dir / "logs" / "trainer.log").read_text(encoding="utf-8")
    assert "Cleared" not in log
    site.check()
    site.server.start()
    with site.server.connect() as raw:
        assert raw.get("rmq:{another}:meta") == b"theirs"
    site.server.stop()
