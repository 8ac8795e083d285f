"""Each kind of broken run is named by its finding: while it runs, and afterwards from its folder."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.run_owner import Stage, read_record
from rolloutmq.views.explain import diagnosis
from tests.pipeline.site import Process, Site
from tests.pipeline.test_run_command import all_gone
from tests.rolloutmq.conftest import in_process

FAILS = """
def train(run, config, model_dir, *, take_over=False):
    raise RuntimeError("the third layer is gone")
"""
MISSES_A_ROLE = {"trainer/gone", "trainer/never_started", "worker/none", "producer/gone"}
LOW, HIGH = "supply/trainer_bound", "waits/summary"


def read(site: Site, *words: str) -> dict[str, dict[str, Any]]:
    """The findings of `status` or `doctor` by their names."""
    done = in_process(*words, "--json", "--run-dir", str(site.run_dir))
    assert done.returncode == 0, done.stderr
    told = orjson.loads(done.stdout)
    found = told["findings"] if words[0] == "status" else told["runs"][site.name]
    return {each["name"]: each for each in found}


def has(site: Site, name: str) -> Callable[[], bool]:
    """Whether `status` has a finding, once the run is made."""

    def is_found() -> bool:
        record = read_record(site.run_dir)
        is_made = record is not None and record.stage is not Stage.PREPARING
        return is_made and name in read(site, "status")

    return is_found


def check_advice(found: dict[str, dict[str, Any]]) -> None:
    """While anything is stuck, nobody is advised to add workers, or to remove them."""
    assert any(each["level"] in ("stuck", "fault") for each in found.values())
    assert LOW not in found
    assert not found.get(HIGH, {"fix": ""})["fix"]


def end(site: Site, process: Process) -> None:
    """Kill a launcher, and wait until its processes have ended by themselves."""
    children = [child for child in process.children() if child.name() != "valkey-server"]
    process.end(signal.SIGKILL)
    for child in children:
        if child.is_running() and child.status() == psutil.STATUS_STOPPED:
            child.kill()
    site.until(lambda: all_gone(children), "the end of its processes")


def folder_alone(site: Site) -> dict[str, dict[str, Any]]:
    """What is found in the folder of an ended run, in all views, once its server is lost."""
    site.server.kill()
    shutil.rmtree(site.server.folder, ignore_errors=True)
    found = read(site, "status")
    assert found.keys() == read(site, "doctor").keys()
    assert (
        in_process("report", str(site.run_dir), "-o", str(site.folder / "r.html")).returncode == 0
    )
    page = (site.folder / "r.html").read_text(encoding="utf-8")
    assert all(name in page for name in found)
    return found


def test_a_worker_that_something_kills_is_named_while_it_runs_and_afterwards(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(steps=9, held=1)
    process = site.start("run")
    site.until_held()
    process.child("worker").kill()
    site.until(has(site, "process/killed"), "the death of a worker")
    assert "process/killed" in read(site, "doctor")
    site.let(1)
    site.until_held()
    end(site, process)
    found = folder_alone(site)
    assert found["launcher/killed"]["level"] == "stuck"
    assert found["process/killed"]["level"] == "note"


def test_a_trainer_without_progress_ends_the_run_and_every_view_has_its_cause(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(steps=9)
    (site.folder / "mine.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    text = site.config.read_text().replace("[trainer]", '[trainer]\nloop = "mine:train"')
    site.config.write_text(text)
    process = site.start_module("rolloutmq", "run", str(site.config))
    site.until(has(site, "process/failed"), "the first death of the trainer")
    assert "trainer/gone" not in read(site, "doctor")
    assert process.wait() == 1
    assert process.said().count("trainer restarted") == 2
    for words in ("status", "doctor"):
        found = read(site, words)
        assert found["process/failed"]["level"] == "fault"
        assert not MISSES_A_ROLE & found.keys()
        check_advice(found)
    assert folder_alone(site)["process/failed"]["level"] == "fault"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of some MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "rollouts", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(1 << 12)):
            pass


@pytest.mark.parametrize("server", ["own", "elsewhere"])
def test_a_full_disk_is_the_cause_and_ends_the_run_soon(
    small_disk: Path, tiny_model: Path, tmp_path: Path, server: str
) -> None:
    """With the server elsewhere, only the trainer needs the disk."""
    site = Site(small_disk / "site", tiny_model, steps=2000)
    other = EmbeddedServer(tmp_path / "server")
    try:
        if server == "elsewhere":
            other.start()
            site.url = other.url
        process = site.start("run")
        site.until(lambda: site.reached() >= 1, "the first step")
        fill(small_disk / "filler")
        assert process.wait() != 0
        record = read_record(site.run_dir)
        assert record
        assert record.stage is Stage.FAILED
        assert record.ended_by
        assert record.ended_by.kind == "disk/full"
        assert "disk" in record.detail.splitlines()[0]
        found = read(site, "status")
        assert found["disk/full"]["level"] == "fault"
        check_advice(found)
        (small_disk / "filler").unlink()
        assert folder_alone(site)["disk/full"]["level"] == "fault"
    finally:
        site.close()
        other.kill()


def test_a_trainer_that_hangs_is_not_one_that_loads(make_site: Callable[..., Site]) -> None:
    site = make_site(steps=9, held=2)
    process = site.start("run")
    site.until_held()
    process.child("train").suspend()
    site.until(has(site, "process/hung"), "the silence of the trainer")
    for words in ("status", "doctor"):
        found = read(site, words)
        assert found["process/hung"]["level"] == "stuck"
        assert "process/loading" not in found
        assert not MISSES_A_ROLE & found.keys()
        check_advice(found)
    site.until(lambda: "has not answered" in process.said(), "the line of the launcher")
    end(site, process)


def test_groups_that_hang_are_stuck(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "PATIENCE_MS", 1)
    monkeypatch.setattr(diagnosis, "HANGS", 0)
    site = make_site(steps=9, held=2)
    site.start("run")
    site.until_held()
    site.until(has(site, "task/hanging"), "the hanging groups")
    check_advice(read(site, "doctor"))


def test_a_server_that_is_full_before_the_first_step_is_waited_for(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(steps=9, held=0)
    site.start("run")
    site.until(has(site, "process/loading"), "the start of its processes")
    with site.server.connect() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 1)
        for words in ("status", "doctor"):
            found = read(site, words)
            assert found["memory/server_full"]["level"] == "stuck"
            check_advice(found)
        client.config_set("maxmemory", 0)


def test_a_run_whose_folder_is_deleted_says_so_and_leaves_no_server(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(steps=9, held=1)
    process = site.start("run")
    site.until_held()
    children = process.children()
    while site.run_dir.exists():  # its processes write meanwhile
        shutil.rmtree(site.run_dir, ignore_errors=True)
    assert process.wait() == 5
    assert f"{site.run_dir} was deleted" in process.said()
    site.until(lambda: all_gone(children), "the end of its processes")
    # weights that were being written may have stayed
    assert not (site.run_dir / "server").exists()
