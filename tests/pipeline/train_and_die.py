"""A trainer that is killed again and again at chosen lines, then one that is not; all from one warm process.

usage: python -m tests.pipeline.train_and_die CONFIG BATCHES
Forks a trainer for each of POINTS, which ends without any clean-up right after that line. Whatever is delivered is
written to BATCHES, and must be byte for byte the same when it is delivered again. At last the batches are
replayed by one undisturbed learner. Prints {"exits": …, "moved": …, "differs": …}.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from safetensors.torch import load_file

from buffer import wire
from buffer.config.loader import load_config
from buffer.open_run import create_run, open_store, server_url
from consumer.advantages import estimate_advantages
from consumer.config import TrainingConfig
from consumer.learner import Learner
from consumer.rollout_consumer import Batch
from consumer.trainer import OPTIMIZER, Trainer

KILLED, CHANGED = 9, 99
POINTS = [
    ("take", 2), ("train", 3), ("pause", 4), ("publish", 5), ("log", 5), ("checkpoint", 6), ("commit", 8),
    ("checkpoint", 10), ("nothing", 0),
]  # fmt: skip


class DoomedTrainer(Trainer):
    """Dies right after `point` of step `step`."""

    def arm(self, point: str, step: int, batches: Path) -> None:
        self._batches = batches
        self._die_at, self._die_in = point, step
        self.consumer.take_batch = self._then("take", self._noting(self.consumer.take_batch))  # type: ignore[method-assign]
        self.consumer.pause = self._then("pause", self.consumer.pause)  # type: ignore[method-assign]
        publish = self.consumer.publish_weights
        self.consumer.publish_weights = self._then("publish", publish)  # type: ignore[method-assign]
        self.consumer.commit = self._then("commit", self.consumer.commit)  # type: ignore[method-assign]
        self._checkpoints.write = self._then("checkpoint", self._checkpoints.write)  # type: ignore[method-assign]
        self._log.add_step = self._then("log", self._log.add_step)  # type: ignore[method-assign]

    def _load_learner(self) -> Learner:
        learner = super()._load_learner()
        learner.train_step = self._then("train", learner.train_step)  # type: ignore[method-assign]
        return learner

    def _step(self, step: int) -> None:
        self._now = step
        super()._step(step)

    def _then(self, point: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def doomed(*args: Any, **more: Any) -> Any:
            result = call(*args, **more)
            if point == self._die_at and getattr(self, "_now", 0) == self._die_in:
                os._exit(KILLED)
            return result

        return doomed

    def _noting(self, take: Callable[..., Batch]) -> Callable[..., Batch]:
        def noted(step: int, *args: Any, **more: Any) -> Batch:
            batch = take(step, *args, **more)
            data = b"".join(wire.encode(group) for group in batch.groups)
            file = self._batches / f"{step}.bytes"
            if file.exists() and file.read_bytes() != data:
                os._exit(CHANGED)
            file.write_bytes(data)
            for place, group in enumerate(batch.groups):
                (self._batches / f"{step}-{place}.group").write_bytes(wire.encode(group))
            return batch

        return noted


def train(config: TrainingConfig, batches: Path, point: str, step: int) -> None:
    """One life of a trainer. Does not return."""
    store = open_store(config, server_url(config), name="doomed", patient=True)
    model = config.policy.model
    assert model is not None
    trainer = DoomedTrainer(create_run(store, config, model), config, model)
    trainer.arm(point, step, batches)
    trainer.fit(take_over=True)
    os._exit(0)


def replay(config: TrainingConfig, batches: Path) -> dict[str, float]:
    """How far the last checkpoint is from a learner that trained the same batches without a stop."""
    assert config.policy.model is not None
    learner = Learner(config.policy.model, config.learner, device="cpu", seed=config.run.seed)
    first = {name: tensor.clone() for name, tensor in learner.state_tensors().items()}
    for step in range(1, config.plan.steps + 1):
        count = len(list(batches.glob(f"{step}-*.group")))
        groups = [wire.decode((batches / f"{step}-{place}.group").read_bytes()) for place in range(count)]
        scores, lengths = [g.scores for g in groups], [g.lengths for g in groups]
        learner.train_step(groups, estimate_advantages("grpo", scores, lengths))
    folder = config.run.folder / "checkpoints" / f"step-{config.plan.steps:06d}"
    last, wanted = load_file(folder / OPTIMIZER), learner.state_tensors()
    assert last.keys() == wanted.keys()
    weights = [name for name in wanted if name.startswith(("model/", "optimizer/"))]
    return {
        "differs": max(float((last[n].double() - wanted[n].double()).abs().max()) for n in weights),
        "moved": max(float((first[n] - wanted[n]).abs().max()) for n in weights if n in first),
    }


def main(path: Path, batches: Path) -> None:
    config = load_config(TrainingConfig, path, [])
    exits = []
    for point, step in POINTS:
        child = os.fork()
        if child == 0:
            try:
                train(config, batches, point, step)
            finally:
                os._exit(1)
        exits.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        sys.stderr.write(f"{point} {step}: {exits[-1]}\n")
    report = {"exits": exits} | replay(config, batches)
    sys.stdout.write(orjson.dumps(report).decode() + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
