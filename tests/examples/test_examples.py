"""The examples, killed and started again.

One of them as a user does it: `rolloutmq train` with a loop of one's own.
"""

from __future__ import annotations

import errno
import os
import runpy
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from buffer.control.events import TrainerReport
from buffer.errors import ConfigError, SchemaVersionError
from buffer.ledger.position import Position
from buffer.manifest import Manifest
from buffer.redis.store import Store
from consumer.grpo.reporting.step_recorder import recorded
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.rollout_consumer import RolloutConsumer
from consumer.handle.sample_log import SampleLog
from consumer.handle.step_log import StepLog, StepWriter, read_evaluations
from rolloutmq.config.load import load_config
from rolloutmq.launch.create import create_again, create_run
from rolloutmq.launch.training import train
from rolloutmq.web.report import write_report
from tests.consumer.handle.crew import MEMBERS, at_work
from tests.docs.test_pages import blocks, files_of_the_readme
from tests.servers import Server
from tests.waits import end_of, until
from tests.warm_process import start_command

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)

ROOT = Path(__file__).parents[2]
STEPS = 4
GROUPS = 3

CONFIG = Path(__file__).with_name("examples.toml").read_text(encoding="utf-8")


class Killed(BaseException):
    """Stands for SIGKILL: no handler catches it."""


CRASHES: list[tuple[type, str, int]] = [
    (RolloutConsumer, "take_batch", 3),
    (CheckpointFolder, "complete", 1),
    (RolloutConsumer, "commit", 1),
    (RolloutConsumer, "publish_weights", 4),
]


class Site:
    """A run that an example trains; prepared groups come from this process."""

    def __init__(self, server: Server, name: str, folder: Path, model: Path, loop: str) -> None:
        self.file = folder / "run.toml"
        self.model = model
        facts = {"name": name, "folder": folder, "model": model, "loop": loop}
        self.file.write_text(
            CONFIG.format(steps=STEPS, groups=GROUPS, members=MEMBERS, **facts), encoding="utf-8"
        )
        self.config = load_config(self.file, [])
        self.store = Store(server.url)
        self.url = server.url
        self.run = create_run(self.store, self.config, model)

    def start(self) -> BaseProcess:
        """Train by `rolloutmq train`, in a process that is forked from a warm one."""
        words = ["train", str(self.file), "--take-over"]
        log = self.file.parent / "train.log"
        return start_command(log, words, os.environ | {"REDIS_URL": self.url})

    def train(self, *, take_over: bool = False) -> None:
        """Train in this process, as `rolloutmq train` does."""
        train(self.run, self.config, self.model, take_over=take_over)

    def fields(self, key: str) -> dict[str, str]:
        found = self.store.client.hgetall(key)
        return {name.decode(): value.decode() for name, value in found.items()}

    def output(self) -> str:
        return (self.file.parent / "train.log").read_text(encoding="utf-8")[-4000:]

    def log(self) -> StepLog:
        log = StepLog(self.config.run.folder / "steps.jsonl")
        log.read_new()
        return log


def check(site: Site) -> None:
    log = site.log()
    run = site.run
    assert [step.step for step in log.steps] == list(range(1, STEPS + 1))
    assert log.trained_twice() == {}
    assert len({gid for step in log.steps for gid in step.gids}) == STEPS * GROUPS
    assert run.ledger.steps()[:2] == (STEPS, STEPS)
    assert run.control.state().weights.version == STEPS
    assert run.control.state().mode == "finish"
    assert run.account.fsck().clean
    assert len(list((site.config.run.folder / "weights").iterdir())) <= 3  # older ones are pruned


@pytest.fixture
def site(server: Server, run_name: str, tmp_path: Path, model_dir: Path, request: Any) -> Any:
    site = Site(server, run_name, tmp_path, model_dir, request.param)
    yield site
    site.store.close()


@pytest.mark.parametrize(
    "site", ["examples.plain_loop:train", "examples.low_level_loop:train"], indirect=True
)
@pytest.mark.parametrize(
    ("owner", "method", "call"), CRASHES, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_a_loop_trains_every_step_once_although_it_dies_right_after(
    site: Site, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int
) -> None:
    calls: list[str] = []

    def dying(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append(method)
        if len(calls) == call:
            raise Killed
        return result

    original = getattr(owner, method)
    with at_work(site.run, math=STEPS * GROUPS):
        monkeypatch.setattr(owner, method, dying)
        with pytest.raises(Killed):
            site.train()
        monkeypatch.undo()
        site.train(take_over=True)
    check(site)
    assert set(read_evaluations(site.config.run.folder)) == {("quiz", STEPS)}
    report = TrainerReport.parse(site.fields(site.run.keys.report))
    assert report.training
    assert report.training.step == STEPS
    assert report.evaluations["quiz"].step == STEPS


@pytest.fixture
def my_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the trainers of README and page, which report nothing, where they can be imported."""
    files = files_of_the_readme() | {block.file: block.code for block in blocks("your_trainer")}
    for name in ("my_trainer.py", "my_long_trainer.py"):
        (tmp_path / name).write_text(files[name], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_trainer")
@pytest.mark.parametrize("site", ["my_trainer:train", "my_long_trainer:train"], indirect=True)
def test_a_full_disk_at_a_commit_loses_no_step(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    add = StepWriter.add_step

    def full(self: StepWriter, step: int, *rest: Any) -> None:
        if step == 2:
            raise OSError(errno.ENOSPC, "full")
        add(self, step, *rest)

    with at_work(site.run, math=STEPS * GROUPS):
        with monkeypatch.context() as patch:
            patch.setattr(StepWriter, "add_step", full)
            with pytest.raises(OSError, match="full"):
                site.train()
        site.train(take_over=True)
    assert [step.step for step in site.log().steps] == list(range(1, STEPS + 1))
    assert len({gid for step in site.log().steps for gid in step.gids}) == STEPS * GROUPS


@pytest.mark.usefixtures("my_trainer")
@pytest.mark.parametrize("site", ["my_trainer:train"], indirect=True)
def test_a_loop_of_ones_own_continues_on_a_server_that_lost_the_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of its keys is a lost run, too: --regenerate is the way over it."""
    with at_work(site.run, math=STEPS * GROUPS), monkeypatch.context() as patch:
        patch.setattr(RolloutConsumer, "finish", lambda _: None)
        site.run.limits.steps = 2
        site.train()
    site.store.client.hset(site.run.keys.meta, "schema", "2")
    with pytest.raises(SchemaVersionError):
        create_run(site.store, site.config, site.model)
    site.run = create_again(site.store, site.config, site.model, print)
    with at_work(site.run, math=STEPS * GROUPS):
        site.train()
    assert [step.step for step in site.log().steps] == list(range(1, STEPS + 1))
    assert site.log().trained_twice() == {}
    assert site.run.ledger.steps()[:2] == (STEPS, STEPS)
    assert site.run.account.fsck().clean


@pytest.mark.usefixtures("my_trainer")
@pytest.mark.parametrize("site", ["my_trainer:train", "my_long_trainer:train"], indirect=True)
def test_a_trainer_that_reports_nothing_has_curves_and_samples(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies between its second checkpoint and the commit of that."""
    commit = RolloutConsumer.commit

    def dying(self: RolloutConsumer, step: int, *, keep: int) -> None:
        if step == 2:
            raise Killed
        commit(self, step, keep=keep)

    with at_work(site.run, math=STEPS * GROUPS):
        with monkeypatch.context() as patch:
            patch.setattr(RolloutConsumer, "commit", dying)
            with pytest.raises(Killed):
                site.train()
        site.train(take_over=True)
    steps = site.log().steps
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert site.log().trained_twice() == {}
    assert len({gid for step in steps for gid in step.gids}) == STEPS * GROUPS
    # the rewards of step 2 were known to the dead process alone
    assert [step.metrics.get("rewards/mean") for step in steps] == [0.5, None, 0.5, 0.5]
    assert all("staleness/max" in step.metrics for step in steps)
    folder = site.config.run.folder
    assert SampleLog(folder).steps() == (1, STEPS)
    assert {sample["why"] for sample in SampleLog(folder).read(STEPS)} >= {"best", "worst"}
    assert write_report(folder, tmp_path / "report.html")


@pytest.mark.parametrize("site", ["unused:train"], indirect=True)
def test_a_report_that_comes_late_is_added_to_its_step(site: Site) -> None:
    with at_work(site.run, math=STEPS * GROUPS), recorded(site.run, site.config, site.model):
        consumer = RolloutConsumer(site.run)
        consumer.open()
        for step in (1, 2):  # it takes ahead
            consumer.take_batch(step, {"math": GROUPS})
        consumer.commit(1, keep=1)
        assert [step.step for step in site.log().steps] == [1]
        consumer.report(2, {"loss/policy": 0.25})
        consumer.report(1, {"loss/policy": np.float32(0.5)})  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match="step 2 are not all numbers"):
            consumer.report(2, {"loss/policy": "low"})  # type: ignore[dict-item]
        consumer.close()
    steps = site.log().steps
    assert [(step.step, step.metrics.get("loss/policy")) for step in steps] == [(1, 0.5), (2, 0.25)]
    assert all(step.metrics["rewards/mean"] == 0.5 for step in steps)


@pytest.mark.parametrize("site", ["unused:train"], indirect=True)
def test_reinforce_trains_every_step_once_although_it_dies(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies after its second commit, and is started again."""
    program = ROOT / "examples" / "reinforce.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["reinforce.py", site.url, site.run.name, str(site.config.policy.model)]
    )
    add = Position.add
    commit = RolloutConsumer.commit
    trained = list[tuple[int, list[str]]]()

    def noting(self: Position, manifest: Manifest) -> None:
        add(self, manifest)
        trained.append((manifest.step, manifest.gids))

    def dying(self: RolloutConsumer, step: int, *, keep: int) -> None:
        commit(self, step, keep=keep)
        if step == 2:
            raise Killed

    monkeypatch.setattr(Position, "add", noting)
    with at_work(site.run, math=STEPS * GROUPS):
        with monkeypatch.context() as patch:
            patch.setattr(RolloutConsumer, "commit", dying)
            with pytest.raises(Killed):
                runpy.run_path(str(program), run_name="__main__")
        runpy.run_path(str(program), run_name="__main__")
    assert [step for step, _ in trained] == [1, 2, 3, 4]
    assert len({gid for _, gids in trained for gid in gids}) == STEPS * GROUPS
    assert site.run.ledger.steps() == (STEPS, STEPS, STEPS)
    assert site.run.control.state().weights.version == STEPS
    assert site.run.account.fsck().clean


@pytest.mark.slow
@pytest.mark.parametrize("site", ["unused:train"], indirect=True)
def test_trl_refuses_a_group_size_that_was_edited(site: Site) -> None:
    trl = pytest.importorskip("examples.trl_async_grpo", exc_type=ImportError)
    tasks = dict(site.config.tasks)
    tasks["math"] = tasks["math"].model_copy(update={"prompt_repeat_k": MEMBERS + 1})
    edited = site.config.model_copy(update={"tasks": tasks})
    with at_work(site.run, math=GROUPS):
        until(lambda: site.run.groups.count({"stage": "pool"}) > 0, "a group")
    crew_size = next(site.run.groups.find({"task": "math"})).samples
    with pytest.raises(ConfigError, match=f"is {MEMBERS + 1}, .* has {crew_size} rollouts"):
        trl.train(site.run, edited, site.config.policy.model)
    assert not site.run.control.holder("trainer").seen_ms


@pytest.mark.slow
@pytest.mark.parametrize("site", ["tests.examples.trl_on_cpu:train"], indirect=True)
def test_trl_trains_every_step_once_although_it_is_killed(site: Site) -> None:
    with at_work(site.run, math=(STEPS - 1) * GROUPS):  # it reads ahead
        process = site.start()

        def over() -> str:
            return end_of(process) and site.output()

        try:
            until(lambda: site.run.ledger.steps()[1] >= 2, "a commit", over)
        finally:
            process.kill()
            process.join()
    with at_work(site.run, math=STEPS * GROUPS):
        again = site.start()
        again.join(500)
        assert again.exitcode == 0, site.output()
    check(site)
    newest = site.config.run.folder / "trl" / f"checkpoint-{STEPS}"
    state = orjson.loads((newest / "trainer_state.json").read_bytes())
    assert state["global_step"] == STEPS
    rewards = [entry["reward"] for entry in state["log_history"] if "reward" in entry]
    assert rewards
    assert all(reward == 0.5 for reward in rewards)  # those of the crew's groups: 0, 1, 0, 1
