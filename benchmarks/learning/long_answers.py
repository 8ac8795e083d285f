"""`python -m benchmarks.learning.long_answers`: what a model learns whose long answers come late.

The reference learner and the real scripts, on a clock that counts tokens: a group is submitted as
many tokens after its start as its longest answer has, and a train step lasts `STEP_TOKENS`. The
longer the answer, the harder the problem. A finished trial is a line of `long_answers.jsonl`, and
is not run again. The plot is made of the lines.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import orjson
import torch
import typer

from benchmarks.learning.__main__ import missing
from benchmarks.learning.fleet import TASK, Fleet, serving
from benchmarks.learning.plot import smooth
from benchmarks.learning.sampler import Sampler
from benchmarks.learning.sums import MOST_TERMS, RUNNING_SUMS, make_model
from buffer.control.control import ControlState
from buffer.ids import new_nonce
from buffer.job import EndedEarly, Job
from buffer.limits import RunLimits, TaskLimits
from buffer.manifest import Manifest
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights.shared_folder import FolderSender
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion
from buffer.wire.staleness import last_step_for
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.models.model_folder import copy_tokenizer
from consumer.grpo.policy.policy import Policy
from consumer.handle.publication import publish
from consumer.handle.rollout_consumer import RolloutConsumer

RESULTS = Path(__file__).parents[1] / "results"
STEP_TOKENS = 1
"""Tokens that a response gains during a train step."""
LEASE_MS = 600_000
"""Nobody dies here, and the machine may be busy."""
PANELS = {
    "hard": "reward of hard problems, whose answers are long",
    "easy": "reward of easy problems",
    "trained_length": "tokens of a trained response",
}
"""Columns that are drawn, and their titles."""

WAYS: dict[str, dict[str, Any]] = {
    "one limit, drop": {"stale_threshold": 2, "on_straggler": "drop"},
    "one limit, retry": {"stale_threshold": 2, "on_straggler": "retry"},
    "one limit, wait": {"stale_threshold": 2, "on_straggler": "wait"},
    "two limits": {"ahead_threshold": 2, "stale_threshold": 9, "on_straggler": "drop"},
}
"""`max_ahead` is 1 in all of them, `max_staleness` 1 or 8."""


@dataclass(frozen=True, slots=True)
class Trial:
    way: str
    seed: int = 0
    steps: int = 60
    rate: float = 1e-3
    batch: int = 32
    k: int = 8


class LateFleet(Fleet):
    """A fleet whose groups arrive as late as their longest answer says."""

    def __init__(self, run: Run, sampler: Sampler, k: int, batch: int) -> None:
        super().__init__(run, sampler, k, batch)
        self.clock = 0  # tokens
        self.started: list[list[RolloutGroup]] = [[]]  # by the version that sampled them
        self._held: list[tuple[int, PolicyVersion, Job, RolloutGroup]] = []
        self._idle_at = (-1, 0)  # version and clock with which nothing was left to do
        self._changed = threading.Condition()
        self.ended = False

    def wait(self, version: int) -> None:
        """Return once all is done that these weights can do at this time."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended or self._idle_at == (version, self.clock))
        if self.ended:
            raise RuntimeError("the fleet has ended")

    def advance(self) -> None:
        """Let the time pass until the next group arrives. Call `wait` before."""
        with self._changed:
            self.clock = min(due for due, *_ in self._held)

    def turn(self) -> bool:
        clock, started = self.clock, sum(map(len, self.started))
        worked = super().turn() or sum(map(len, self.started)) > started
        if not worked:
            with self._changed:
                self._idle_at = (len(self.started) - 1, clock)
                self._changed.notify_all()
        return worked

    def serve(self) -> None:
        try:
            super().serve()
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _held_groups(self) -> Mapping[Job, PolicyVersion]:
        return {job: weights for _, weights, job, _ in self._held}

    def _sample(self, state: ControlState) -> list[tuple[Job, RolloutGroup]]:
        while len(self.started) <= state.weights.version:
            self.started.append([])
            self.clock += STEP_TOKENS
            self._expire(state.weights.version)
        for job, group in super()._sample(state):
            due = self.clock + int(group.lengths.max())
            self._held.append((due, state.weights, job, group))
            self.started[-1].append(group)
        arrived = [held for held in self._held if held[0] <= self.clock]
        self._held = [held for held in self._held if held[0] > self.clock]
        return [(job, group) for _, _, job, group in arrived]

    def _expire(self, version: int) -> None:
        """End what can serve no step after `version`."""
        self._run.buffer.refresh_staleness()
        for held in list(self._held):
            _, weights, job, group = held
            if version >= last_step_for(weights.version, self._run.limits.stale_threshold):
                self._held.remove(held)
                ended = EndedEarly(int(group.lengths.sum()), 0, {weights.lineage: weights.version})
                self._run.jobs.release("w0", job, "expired", "too old for every step", ended)


def run_trial(url: str, model: Path, trial: Trial, folder: Path) -> dict[str, list[float]]:
    """Return a column for each figure: a value a step."""
    limits = RunLimits(
        steps=trial.steps,
        batch_size=trial.batch,
        tasks={TASK: TaskLimits()},
        lease_ms=LEASE_MS,
        **WAYS[trial.way],
    )
    store = Store(url)
    initial = PolicyVersion("initial", 0)
    run = Run.create(store, new_nonce(), new_nonce(), limits, initial, str(model))
    config = LearnerConfig(learning_rate=trial.rate, warmup_steps=5)
    controller = TrainController(Policy(model, config, seed=trial.seed))
    fleet = LateFleet(run, Sampler(model, trial.k, trial.seed, RUNNING_SUMS), trial.k, trial.batch)
    try:
        with serving(run, fleet):
            return train(run, fleet, controller, trial, folder / run.name, model)
    finally:
        store.close()


def train(
    run: Run,
    fleet: LateFleet,
    controller: TrainController,
    trial: Trial,
    folder: Path,
    model: Path,
) -> dict[str, list[float]]:
    consumer, weights = RolloutConsumer(run), FolderSender(folder)

    def save(to: Path) -> None:
        controller.policy.save_weights(to, to_publish=True)
        copy_tokenizer(model, to)

    consumer.open()
    columns: dict[str, list[float]] = {}
    for step in range(1, trial.steps + 1):
        fleet.wait(step - 1)
        wanted = {TASK: trial.batch}
        while not isinstance(run.ledger.take(consumer.nonce, step, wanted), Manifest):
            fleet.advance()
            fleet.wait(step - 1)
        batch = consumer.take_batch(step, wanted)
        controller.fit(batch.groups)
        ages = [step - 1 - (entry.version or 0) for entry in batch.manifest.entries]
        point = figures(fleet.started[step - 1], batch.groups)
        point |= {"clock": fleet.clock, "staleness": float(np.mean(ages))}
        for name, value in point.items():
            columns.setdefault(name, []).append(round(value, 4))
        publish(consumer, weights, step, save, pause="keep")
        consumer.commit(step, keep=step)
    consumer.finish()
    consumer.close()
    return columns


def figures(started: Sequence[RolloutGroup], trained: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return rewards of the groups that began with the newest weights, and mean lengths.

    Near the end none begins: nan, which is null in the line.
    """
    values = {
        "hard": [group.scores.mean() for group in started if is_hard(group)],
        "easy": [group.scores.mean() for group in started if not is_hard(group)],
        "started_length": [group.lengths.mean() for group in started],
        "trained_length": [group.lengths.mean() for group in trained],
    }
    return {name: float(np.mean(each)) if each else nan for name, each in values.items()}


def is_hard(group: RolloutGroup) -> bool:
    return len(group.states[0].ground_truth) == MOST_TERMS


def plot(lines: Path, file: Path) -> None:
    """Draw the lines of `main`: a line is a mean over seeds, its band their range."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    trials = [orjson.loads(line) for line in lines.read_bytes().splitlines()]
    figure, axes = plt.subplots(1, len(PANELS), figsize=(15, 4.5), layout="constrained")
    for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
        for way in WAYS:
            of_way = [trial for trial in trials if trial["setting"]["way"] == way]
            if of_way:
                curves = np.array([smooth(trial[name]) for trial in of_way])
                steps = np.arange(1, curves.shape[1] + 1)
                (line,) = axis.plot(steps, curves.mean(0), label=f"{way} (n = {len(of_way)})")
                axis.fill_between(
                    steps, curves.min(0), curves.max(0), alpha=0.15, color=line.get_color()
                )
        axis.set(title=title, xlabel="train step", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(file, dpi=100)
    plt.close(figure)


def main(
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 60,
    results: Annotated[
        Path, typer.Option(help="where long_answers.jsonl and long_answers.png go")
    ] = RESULTS,
) -> None:
    """Train the same small model in every way."""
    torch.set_num_threads(1)
    file = results / "long_answers.jsonl"
    results.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as temporary, EmbeddedServer(Path(temporary) / "server") as server:
        folder = Path(temporary)
        model = make_model(folder, RUNNING_SUMS)
        trials = [Trial(way, seed, steps) for seed in range(seeds) for way in WAYS]
        for trial in missing(trials, file):
            columns = run_trial(server.url, model, trial, folder)
            typer.echo(f"{trial.way}, seed {trial.seed}: hard {columns['hard'][-1]:.2f}")
            with file.open("ab") as lines:
                lines.write(orjson.dumps({"setting": asdict(trial)} | columns) + b"\n")
    plot(file, results / "long_answers.png")


if __name__ == "__main__":
    typer.run(main)
