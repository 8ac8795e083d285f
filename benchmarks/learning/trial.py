"""One trial: a run of some steps at one staleness, with or without correction, from one seed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.learning.fleet import TASK
from benchmarks.learning.sampler import Sampler
from buffer import PolicyVersion, Run, RunLimits, Store, TaskLimits, group_id, new_nonce
from consumer.learner import Learner
from consumer.learner_config import LearnerConfig, LossConfig
from consumer.rollout_consumer import RolloutConsumer
from consumer.train_controller import TrainController
from consumer.weights.shared_folder import SharedFolder


@dataclass(frozen=True, slots=True)
class Setting:
    """`corrected`: the loss is weighted by how likely the present policy finds what an older one sampled.

    `at_bound`: the trainer waits until the fleet is as far ahead as it may be, so that staleness is the bound and not
    what comes of the speeds; nothing overlaps then, and wall times mean nothing.
    """

    staleness: int = 0
    corrected: bool = True
    seed: int = 0
    steps: int = 60
    batch: int = 32
    k: int = 8
    at_bound: bool = False

    @property
    def name(self) -> str:
        return f"s{self.staleness}-{'corrected' if self.corrected else 'plain'}-{self.seed}"


Point = dict[str, float]
"""Of one step: step, wall_s since the first take began, reward, staleness, loss."""


def make_controller(model: Path, setting: Setting) -> TrainController:
    loss = LossConfig(importance_cap=2.0 if setting.corrected else None)
    config = LearnerConfig(learning_rate=1e-3, warmup_steps=5, old_policy="current", loss=loss)
    return TrainController(Learner(model, config, seed=setting.seed))


def make_run(store: Store, name: str, model: Path, setting: Setting) -> Run:
    limits = RunLimits(
        stale_threshold=setting.staleness + 1,
        steps=setting.steps,
        batch_size=setting.batch,
        tasks={TASK: TaskLimits()},
        tail_batch_trigger_size=0,
    )
    return Run.create(store, name, new_nonce(), limits, PolicyVersion("initial", 0), str(model))


def train(run: Run, controller: TrainController, setting: Setting, folder: Path, model: Path) -> list[Point]:
    """The trainer of a trial; somebody else makes its groups."""
    consumer, weights, points = RolloutConsumer(run), SharedFolder(folder / run.name), []
    consumer.open()
    started = time.monotonic()
    for step in range(1, setting.steps + 1):
        if setting.at_bound:
            ahead = min(setting.staleness + 1, setting.steps - step + 1) * setting.batch
            while run.buffer.count(TASK) < ahead:
                time.sleep(0.01)
        batch = consumer.take_batch(step, {TASK: setting.batch})
        metrics = controller.fit(batch.groups)
        ages = [step - entry.version - 1 for entry in batch.manifest.entries if entry.version is not None]
        controller.sync_weights(consumer, weights, step, mode="keep", tokenizer=model)
        consumer.commit(step, keep=step)
        scores = [float(score) for group in batch.groups for score in group.scores]
        point = {"step": step, "wall_s": time.monotonic() - started, "reward": sum(scores) / len(scores)}
        points.append(point | {"staleness": sum(ages) / len(ages), "loss": metrics["loss/policy"]})
    consumer.finish()
    consumer.close()
    return points


def run_trial(url: str, model: Path, setting: Setting, folder: Path, say: Callable[[str], None]) -> list[Point]:
    """With the fleet in a process of its own, so that sampling and training overlap as they do in a run."""
    name = f"{setting.name}-{new_nonce()[:6]}"
    store = Store(url)
    run = make_run(store, name, model, setting)
    arguments = [url, name, model, setting.k, setting.batch, setting.seed]
    fleet = subprocess.Popen([sys.executable, "-m", "benchmarks.learning.fleet", *map(str, arguments)])
    try:
        points = train(run, make_controller(model, setting), setting, folder, model)
    finally:
        fleet.terminate()
        fleet.wait()
        store.close()
    say(f"{setting.name}: reward {points[0]['reward']:.2f} to {points[-1]['reward']:.2f}, {points[-1]['wall_s']:.0f} s")
    return points


def train_in_process(controller: TrainController, setting: Setting, model: Path, folder: Path) -> list[Point]:
    """The same on-policy loop without a queue, a server or a second process: what staleness 0 must equal."""
    sampler, points = Sampler(model, setting.k, setting.seed), []
    for step in range(1, setting.steps + 1):
        gids = [group_id(TASK, (step - 1) * setting.batch + place) for place in range(setting.batch)]
        groups = [sampler.answer(sampler.prompt(gid), PolicyVersion("local", step - 1)) for gid in gids]
        metrics = controller.fit(groups)
        (folder / str(step)).mkdir(parents=True)
        controller.learner.save_weights(folder / str(step))
        sampler.load(folder / str(step))
        scores = [float(score) for group in groups for score in group.scores]
        points.append({"step": step, "reward": sum(scores) / len(scores), "loss": metrics["loss/policy"]})
    return points
