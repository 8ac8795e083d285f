"""A run that a test holds makes the steps that it may make, and a wait for another ends with the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from tests.pipeline.site import Site
from tests.rolloutmq.conftest import in_process
from tests.waits import end_of, until


def test_a_wait_ends_with_the_process_that_could_end_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        with pytest.raises(AssertionError, match=rf"a word never came: process {process.pid} .* 3"):
            until(lambda: False, "a word", partial(end_of, process))
        assert until(lambda: "it came before the end", "a word", partial(end_of, process))


def test_a_held_run_makes_the_steps_that_it_may_make(make_site: Callable[..., Site]) -> None:
    """Its weights serve two steps more, for which groups are claimed by then."""
    site = make_site(held=1)
    site.server.start()
    _, _, worker = (site.start(verb) for verb in ("train", "producer", "worker"))
    site.until_held()
    where = ("--run-dir", str(site.run_dir))
    # a pause gives up what the worker has claimed, and the worker claims it again
    for words in (["pause", "--mode", "abort", "--wait"], ["resume"]):
        assert in_process(*words, *where).returncode == 0
    assert site.reached() == 1
    assert site.reach(1) == site.reached() == 2
    os.kill(worker.pid, signal.SIGKILL)
    site.let(1)
    with pytest.raises(
        AssertionError, match=f"step 3 never came: process {worker.pid} ended"
    ) as failed:
        site.until_held()
    assert "simulated engine" in str(failed.value), "the last lines of all logs"
