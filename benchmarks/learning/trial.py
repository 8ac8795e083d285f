"""One trial: a run of some steps at one staleness, with one loss, from one seed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.fleet import TASK, Fleet, serving
from benchmarks.learning.sampler import Sampler
from buffer.ids import group_id, new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights.shared_folder import FolderSender
from buffer.wire.rollout import PolicyVersion
from consumer.config.learner import LearnerConfig, LossConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.models.model_folder import copy_tokenizer
from consumer.grpo.policy.policy import Policy
from consumer.handle.publication import publish
from consumer.handle.rollout_consumer import RolloutConsumer

PATIENCE_S = 600.0
"""Give up a trial whose fleet makes nothing for so long."""


LOSSES: dict[str, dict[str, Any]] = {
    "default": {},
    "current": {"old_policy": "current"},  # weighted, but nothing is clipped
    "plain": {"old_policy": "current", "loss": LossConfig(importance_cap=None)},
    "cispo": {"loss": LossConfig(objective="cispo")},
    "gspo": {"loss": LossConfig(objective="gspo")},
}
"""Settings of [learner] whose learning is compared."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a trial: staleness, a loss of `LOSSES`, learning rate and seed.

    `overlaps`: sampling, in a process of its own, and training go on at once, and staleness is what
    comes of their speeds, up to the bound: what wall times are about. Else the trainer waits until
    the fleet is as far ahead as it may be, so that staleness is the bound, and a trial is the same
    whatever else the machine does.
    """

    staleness: int = 0
    loss: str = "default"
    rate: float = 1e-3
    seed: int = 0
    steps: int = 100
    batch: int = 32
    k: int = 8
    overlaps: bool = False

    @property
    def name(self) -> str:
        timing = "overlapping" if self.overlaps else "at-bound"
        return f"s{self.staleness}-{self.loss}-{self.rate:g}-{self.seed}-{timing}"


Point = dict[str, float]
"""Of one step: step, wall_s since the first take began, train_s of a core (no waiting), reward,
staleness, loss.
"""


def make_controller(model: Path, setting: Setting) -> TrainController:
    config = LearnerConfig(learning_rate=setting.rate, warmup_steps=5, **LOSSES[setting.loss])
    return TrainController(Policy(model, config, seed=setting.seed))


def make_run(store: Store, name: str, model: Path, setting: Setting) -> Run:
    limits = RunLimits(
        stale_threshold=setting.staleness + 1,
        steps=setting.steps,
        batch_size=setting.batch,
        tasks={TASK: TaskLimits()},
        on_straggler="retry",
    )
    return Run.create(store, name, new_nonce(), limits, PolicyVersion("initial", 0), str(model))


def train(
    run: Run, controller: TrainController, setting: Setting, folder: Path, model: Path
) -> list[Point]:
    """Return the trainer of a trial, whose groups another process makes."""
    consumer, weights, points = RolloutConsumer(run), FolderSender(folder / run.name), []

    def save(to: Path) -> None:
        controller.policy.save_weights(to, to_publish=True)
        copy_tokenizer(model, to)

    consumer.open()
    started = time.monotonic()
    for step in range(1, setting.steps + 1):
        if not setting.overlaps:
            _wait_for(run, min(setting.staleness + 1, setting.steps - step + 1) * setting.batch)
        used = time.thread_time()
        batch = consumer.take_batch(step, {TASK: setting.batch})
        metrics = controller.fit(batch.groups)
        ages = [
            step - entry.version - 1
            for entry in batch.manifest.entries
            if entry.version is not None
        ]
        publish(consumer, weights, step, save, pause="keep")
        consumer.commit(step, keep=step)
        scores = [float(score) for group in batch.groups for score in group.scores]
        clocks = {"wall_s": time.monotonic() - started, "train_s": time.thread_time() - used}
        point = {
            "step": step,
            "reward": sum(scores) / len(scores),
            "staleness": sum(ages) / len(ages),
        }
        taught = {name: value for name, value in metrics.items() if name.startswith("distill/")}
        points.append(clocks | point | {"loss": metrics["loss/policy"]} | taught)
    consumer.finish()
    consumer.close()
    return points


def run_trial(url: str, model: Path, setting: Setting, folder: Path) -> tuple[list[Point], float]:
    """Run all steps of a trial; return also the processor time of sampling (0 if not counted).

    Weights are exchanged through `folder`.
    """
    store = Store(url)
    run = make_run(store, f"{setting.name}-{new_nonce()[:6]}", model, setting)
    beside = (
        fleet_process(url, run, model, setting)
        if setting.overlaps
        else fleet_thread(run, model, setting)
    )
    try:
        with beside as fleet:
            points = train(run, make_controller(model, setting), setting, folder, model)
        return points, fleet.busy_s / setting.steps if fleet else 0.0
    finally:
        store.close()


@contextmanager
def fleet_process(url: str, run: Run, model: Path, setting: Setting) -> Iterator[None]:
    arguments = [url, run.name, model, setting.k, setting.batch, setting.seed]
    fleet = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.learning.fleet", *map(str, arguments)]
    )
    try:
        yield
    finally:
        fleet.terminate()
        fleet.wait()


@contextmanager
def fleet_thread(run: Run, model: Path, setting: Setting) -> Iterator[Fleet]:
    fleet = Fleet(run, Sampler(model, setting.k, setting.seed), setting.k, setting.batch)
    with serving(run, fleet):
        yield fleet


def _wait_for(run: Run, groups: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while run.buffer.count(TASK) < groups:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{run.buffer.count(TASK)} of {groups} groups after {PATIENCE_S:.0f} s"
            )
        time.sleep(0.01)


def train_in_process(
    controller: TrainController, setting: Setting, model: Path, folder: Path
) -> list[Point]:
    """Run the same on-policy loop without queue, server or second process.

    Staleness 0 must equal it.
    """
    sampler, points = Sampler(model, setting.k, setting.seed), []
    for step in range(1, setting.steps + 1):
        gids = [
            group_id(TASK, (step - 1) * setting.batch + place) for place in range(setting.batch)
        ]
        groups = sampler.answer(
            [sampler.prompt(gid) for gid in gids], PolicyVersion("local", step - 1)
        )
        metrics = controller.fit(groups)
        (folder / str(step)).mkdir(parents=True)
        controller.policy.save_weights(folder / str(step))
        sampler.load(folder / str(step))
        scores = [float(score) for group in groups for score in group.scores]
        points.append(
            {"step": step, "reward": sum(scores) / len(scores), "loss": metrics["loss/policy"]}
        )
    return points
