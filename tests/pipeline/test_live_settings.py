"""`rolloutmq set` in an active run: producer and worker adopt the settings, events report them."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.config.assignments import parse_settings
from buffer.control.control import Mode
from buffer.limits import TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.run.settings import LiveSettings
from buffer.wire.sampling import SampleParams
from producer_workers.datasets.files import JsonlDataset
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from tests.pipeline.site import Process, Site
from tests.pipeline.yard import TASK, Letters, Yard
from tests.rolloutmq.conftest import in_process


def change(yard: Yard, *assignments: str) -> None:
    """As the command does it: with a handle of its own."""
    Run.open(yard.store, yard.run.name).set(parse_settings(LiveSettings, assignments))


def set_events(yard: Yard) -> list[str]:
    rows = [fields for _, fields in yard.store.client.xrange(yard.run.keys.events)]
    return [
        f"{row[b'field'].decode()}={row[b'value'].decode()}"
        for row in rows
        if row[b"event"] == b"set"
    ]


async def test_the_producer_follows_weights_staleness_and_over_sampling_while_it_runs(
    make_yard: Callable[..., Yard], tmp_path: Path
) -> None:
    yard = make_yard(tasks={TASK: TaskLimits(), "more": TaskLimits()}, batch_size=8, steps=50)
    rows = [orjson.dumps({"question": f"{n}", "answer": n}) for n in range(9)]
    (tmp_path / "problems.jsonl").write_bytes(b"\n".join(rows))
    run = Run.open(yard.store, yard.run.name)
    dataset = JsonlDataset(tmp_path / "problems.jsonl")
    samplers = {
        name: Sampler(name, dataset, Letters(), SampleParams()) for name in run.limits.tasks
    }
    producer = Producer(run, samplers, strategies_of(run.limits))
    stop = threading.Event()
    thread = threading.Thread(
        target=producer.produce_loop, args=(stop,), kwargs={"take_over": True}
    )

    async def waiting(**counts: int) -> None:
        def found() -> dict[str, int]:
            return {task.task: task.waiting for task in yard.run.account.totals().tasks}

        await yard.until(lambda: found() == {TASK: counts["sums"], "more": counts["more"]})

    thread.start()
    try:
        await waiting(sums=4, more=4)
        change(yard, "tasks.more.weight=3")  # from step 2 on: nothing of that is started yet
        yard.publish(1)
        await waiting(sums=4 + 2, more=4 + 6)
        change(yard, "max_staleness=1")
        await waiting(sums=4 + 2 * 2, more=4 + 2 * 6)
        change(yard, "over_sample_threshold=0.5")
        await waiting(sums=4 + 2 * 2 + 1, more=4 + 2 * 6 + 3)
    finally:
        stop.set()
        thread.join()
    fields = [event.partition("=")[0] for event in set_events(yard)]
    assert fields == ["reweighted", "stale_threshold", "over_sample_threshold"]
    assert yard.store.client.hget(yard.run.keys.meta, "limits_version") == b"3"


async def test_a_worker_follows_its_concurrency_while_it_runs(yard: Yard) -> None:
    """Groups that never end: what is held is what it may hold, and nothing else."""
    yard.enqueue(10)
    async with yard.working(yard.worker(held=True, concurrency=6, drain_timeout_s=0.0)):
        await yard.until(lambda: yard.leases() == 6)
        change(yard, "concurrency=8")
        await yard.until(lambda: yard.leases() == 8)
        change(yard, "concurrency=2")
        await yard.until(lambda: yard.run.limits.concurrency == 2)
        # what it holds is not taken away; from now on there is room for two
        assert yard.leases() == 8
        await yard.receipts(yard.control(Mode.ABORT))
        yard.control(Mode.RUN)
        assert yard.reissue() == 8
        await yard.until(lambda: yard.leases() == 2)
        await yard.until_idle()
        assert yard.leases() == 2
    assert set_events(yard) == ["concurrency=8", "concurrency=2"]
    yard.check()


# -- auto concurrency ------------------------------


def said(yard: Yard) -> int:
    """Return what `rolloutmq workers` shows."""
    return yard.run.fleet.workers()[0].concurrency


async def test_an_engine_with_room_is_filled_and_one_that_queues_is_given_less(yard: Yard) -> None:
    for _ in range(3):
        yard.enqueue(128, (300, 300))
    async with yard.working(
        yard.worker(held=True, concurrency="auto", max_num_seqs=40, drain_timeout_s=0.0)
    ) as engine:
        # two requests a group, so 20 groups fill it: the search doubles from 8 to 32 or more,
        # and comes back
        await yard.until(lambda: engine.load().running == 40)
        await yard.until(lambda: 18 <= said(yard) < 32)
        yard.run.set(LiveSettings(concurrency=3))
        await yard.until(lambda: said(yard) == 3)
        yard.run.set(LiveSettings(concurrency="auto"))
        await yard.until(lambda: 18 <= said(yard) < 32)
    yard.check()


# -- settings survive ------------------------------


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

    def limits(self) -> tuple[int, int, int]:
        store = Store(self.site.server.url, deadline_s=400.0)
        try:
            limits = Run.open(store, self.site.name).limits
        finally:
            store.close()
        return limits.steps, limits.max_tries, limits.stale_threshold


def restarted(site: Site, launcher: Process, name: str, process: str) -> None:
    before = launcher.said().count(f"{name} restarted")
    launcher.child(process).kill()
    site.until(lambda: launcher.said().count(f"{name} restarted") > before, f"another {name}")


@pytest.mark.slow
def test_what_was_set_survives_each_process_the_server_and_its_data(
    make_site: Callable[..., Site],
) -> None:
    """The plan has 400 steps fewer than what was set: a run that forgets ends at once."""
    site = make_site(steps=6, held=0)
    person = Person(site)
    launcher = site.start("run")
    site.reach(1)
    person.command("set", "steps=400", "max_tries=7", "max_staleness=2")
    wanted = {"steps": 400, "max_tries": 7, "max_staleness": 2}
    assert person.listed() == wanted
    # half an edit: a process that is started again is no start by hand
    person.edit("[lease]", "[lease]\nmax_tries = 5")
    for name, process in (("trainer", "train"), ("producer", "producer"), ("worker-0", "worker")):
        restarted(site, launcher, name, process)
        site.reach(2)
        assert person.limits() == (400, 7, 3), launcher.said()
    site.kill_server()
    site.reach(2)
    assert person.limits() == (400, 7, 3), launcher.said()

    code, output = site.command("train", "--set", "plan.steps=9")
    assert code == 5, output  # refused while another trainer is alive, and so is its plan
    assert person.listed() == wanted
    person.command("pause", "--mode", "drain")
    site.let(4)  # what was claimed is finished, and nothing else is claimed
    person.command("pause", "--mode", "drain", "--wait")
    person.command("set", "steps=401")
    restarted(site, launcher, "trainer", "train")
    assert person.listed() == {**wanted, "steps": 401}
    person.command("resume")
    site.until_held()
    launcher.end(signal.SIGTERM)
    assert "of 401 steps" in " ".join(launcher.said().split())

    # by hand: of the two values that were set, the file has changed one
    launcher = site.start("run")
    site.reach(2)
    assert "max_tries: 7 → 5" in launcher.said()
    assert person.listed() == {"steps": 401, "max_staleness": 2}
    launcher.end(signal.SIGTERM)

    # the server loses everything
    shutil.rmtree(site.run_dir / "server")
    assert site.command("run")[0] == 5
    launcher = site.start("run", "--regenerate")
    site.steps = site.reach(2) + 2
    assert person.listed() == {"steps": 401, "max_staleness": 2}
    person.command("set", f"steps={site.steps}", "max_staleness=config")
    site.let_go()
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
    site = make_site(steps=12, held=3)
    person = Person(site)
    launcher = site.start("run")
    site.until_held()
    launcher.end(signal.SIGTERM)
    site.let_go()
    person.edit("prompt_repeat_k = 4", "prompt_repeat_k = 8")
    code, output = site.command("run")
    assert code == 0, output + site.words()
    assert "prompt_repeat_k: 4 → 8" in output
    site.check()
    # every response has 12 tokens
    rollouts = [step.metrics["response_len/tokens"] / 12 for step in site.history().steps]
    assert (rollouts[0], rollouts[-1]) == (4 * 4, 4 * 8)
    assert rollouts == sorted(rollouts)
