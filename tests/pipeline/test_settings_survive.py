"""What `rolloutmq set` changed survives each process and server of a whole run, killed for real."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from typing import Any

import orjson
import psutil
import pytest

from buffer.control.control import Mode
from buffer.redis.store import Store
from buffer.run import Run
from tests.pipeline.site import Process, Site
from tests.rolloutmq.conftest import in_process


class Person:
    """Who steers the run of a site from a shell."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def command(self, verb: str, *words: str) -> str:
        done = in_process(verb, *words, "--run-dir", str(self.site.run_dir))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def listed(self) -> dict[str, Any]:
        found = orjson.loads(self.command("set", "--list", "--json"))["settings"]
        return {each["name"]: each["value"] for each in found}

    def edit(self, old: str, new: str) -> None:
        text = self.site.config.read_text(encoding="utf-8")
        assert old in text
        self.site.config.write_text(text.replace(old, new), encoding="utf-8")

    def trains_on(self, steps: int = 2) -> None:
        """Wait until this number of further steps was trained."""
        self.site.until_step(max((step for step, _ in self.site.lines()), default=0) + steps)

    def limits(self) -> tuple[int, int, int]:
        store = Store(self.site.server.url, deadline_s=400.0)
        try:
            limits = Run.open(store, self.site.name).limits
        finally:
            store.close()
        return limits.steps, limits.max_tries, limits.stale_threshold


def kill_child(process: Process, name: str) -> None:
    """Kill a process of `rolloutmq run` by its name."""
    for child in psutil.Process(process.pid).children():
        if child.name() == name:
            child.kill()
            return
    raise AssertionError(f"no {name} among the children")


def restarted(site: Site, launcher: Process, name: str, process: str) -> None:
    """Kill a process of the run, and wait until the launcher has started it again."""
    before = launcher.said().count(f"{name} restarted")
    kill_child(launcher, process)
    site.until(lambda: launcher.said().count(f"{name} restarted") > before, f"another {name}")


@pytest.mark.slow
def test_what_was_set_survives_each_process_the_server_and_its_data(
    make_site: Callable[..., Site],
) -> None:
    """The plan has 400 steps fewer than what was set: a run that forgets ends at once."""
    site = make_site(steps=6, token_s=0.05)
    person = Person(site)
    launcher = site.start("run")
    site.until_step(1)
    person.command("set", "steps=400", "max_tries=7", "max_staleness=2")
    wanted = {"steps": 400, "max_tries": 7, "max_staleness": 2}
    assert person.listed() == wanted
    # half an edit: a process that is started again is no start by hand
    person.edit("[lease]", "[lease]\nmax_tries = 5")
    for name, process in (
        ("trainer", "train"),
        ("producer", "producer"),
        ("worker-0", "worker"),
    ):
        restarted(site, launcher, name, process)
        person.trains_on()
        assert person.limits() == (400, 7, 3), launcher.said()
    site.server.kill()
    person.trains_on()
    assert person.limits() == (400, 7, 3), launcher.said()

    code, output = site.command("train", "--set", "plan.steps=9")
    assert code == 5, output  # refused while another trainer is alive, and so is its plan
    assert person.listed() == wanted
    person.command("pause", "--mode", "drain", "--wait")
    person.command("set", "steps=401")
    restarted(site, launcher, "trainer", "train")
    assert person.listed() == {**wanted, "steps": 401}
    person.command("resume")
    person.trains_on()
    launcher.end(signal.SIGTERM)
    assert "of 401 steps" in " ".join(launcher.said().split())

    # by hand: of the two values that were set, the file has changed one
    launcher = site.start("run")
    person.trains_on()
    assert "max_tries: 7 → 5" in launcher.said()
    assert person.listed() == {"steps": 401, "max_staleness": 2}
    launcher.end(signal.SIGTERM)

    # the server loses everything
    shutil.rmtree(site.run_dir / "server")
    assert site.command("run")[0] == 5
    last = max(step for step, _ in site.lines()) + 4
    launcher = site.start("run", "--regenerate")
    person.trains_on()
    assert person.listed() == {"steps": 401, "max_staleness": 2}
    site.steps = last + 3
    person.command("set", f"steps={site.steps}", "max_staleness=config")
    assert launcher.wait() == 0, launcher.said() + site.words()
    site.check()
    code, output = site.command("run")
    assert code == 0
    assert f"all {site.steps} steps are done" in output
    with_server = site.server
    with_server.start()
    store = Store(with_server.url, deadline_s=400.0)
    assert Run.open(store, site.name).control.state().mode is Mode.FINISH
    store.close()
    with_server.stop()


@pytest.mark.slow
def test_groups_of_two_sizes_are_trained_together_once_a_config_has_another(
    make_site: Callable[..., Site],
) -> None:
    """`prompt_repeat_k` 4 becomes 8: what was drawn with 4 is used up, and batches have both."""
    site = make_site(steps=12)
    person = Person(site)
    launcher = site.start("run")
    site.until_step(3)
    launcher.end(signal.SIGTERM)
    person.edit("prompt_repeat_k = 4", "prompt_repeat_k = 8")
    code, output = site.command("run")
    assert code == 0, output + site.words()
    assert "prompt_repeat_k: 4 → 8" in output
    site.check()
    # every response has 12 tokens
    rollouts = [step.metrics["response_len/tokens"] / 12 for step in site.history().steps]
    assert (rollouts[0], rollouts[-1]) == (4 * 4, 4 * 8)
    assert rollouts == sorted(rollouts)
