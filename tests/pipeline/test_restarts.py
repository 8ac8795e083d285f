from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from rolloutmq.launch.child import STOPPED
from tests.pipeline.site import Process, Site
from tests.pipeline.test_run_command import all_gone, change
from tests.waits import until


def test_a_worker_that_dies_again_and_again_but_hands_in_groups_does_not_end_the_run(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(steps=12)
    change(site, "judges:by_chance", "judges:dies")
    code, output = site.command("run", "--set", "lease.max_tries=100")
    assert code == 0, output + site.words()
    assert output.count("worker-0 ended with exit code 9") > 3
    site.check()


def test_a_run_whose_folder_is_deleted_ends_with_that_cause_and_leaves_no_process(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(held=0)
    run = site.start("run")
    site.reach(1)
    processes = [*run.children(), psutil.Process(site.server.pid)]
    gone = site.run_dir.rename(site.folder / "gone")
    shutil.rmtree(gone, ignore_errors=True)
    assert run.wait() == 5
    assert f"{site.run_dir} was deleted while the run used it" in run.said()
    until(lambda: all_gone(processes), "the end of its processes")
    assert not (site.run_dir / "server").exists()  # a trainer may have begun a checkpoint


def test_a_server_that_is_full_before_the_first_step_is_in_the_line_of_the_run(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(held=0)
    run = site.start("run")
    site.until(lambda: "; logs in" in run.said(), "the run")
    with site.server.connect() as client:
        client.config_set("maxmemory", 1)
        site.until(lambda: "the server is full: " in run.said(), "that the server is full")
        client.config_set("maxmemory", 0)
    site.reach(1)
    site.until(lambda: "the server is full" not in run.said().splitlines()[-1], "room")


def is_back(run: Process, deaths: int) -> bool:
    return run.exit_code is not None or run.said().count("server restarted") >= deaths


@pytest.mark.slow
def test_a_server_that_ends_again_and_again_ends_the_run(make_site: Callable[..., Site]) -> None:
    site = make_site(held=0)
    run = site.start("run")
    site.reach(1)
    for deaths in range(1, STOPPED + 2):
        site.kill_server()
        until(partial(is_back, run, deaths), f"{deaths} restarts, or the end")
    assert run.wait() == 3
    assert f"ended {STOPPED} times within" in run.said()
    log = Path(site.run_dir / "server" / "valkey.log")
    assert f"its log: {log}" in run.said()
