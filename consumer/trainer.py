"""The reference trainer: asynchronous GRPO on one device, restartable at any line.

Per step: take the batch, train, write a checkpoint where one is due and commit it, publish the new weights
around a pause. The position lives in the checkpoint; Redis delivers what follows it again (I5, I6).
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from buffer.config_file import allocate
from buffer.errors import LostRun, ModelError
from buffer.manifest import NotReady
from buffer.rollout import PolicyVersion
from buffer.run import Run
from buffer.staleness import staleness
from consumer.advantages import estimate_advantages
from consumer.checkpoint import CheckpointFolder, Position
from consumer.config import TrainingConfig
from consumer.evaluator import Evaluator
from consumer.learner import Learner
from consumer.rollout_consumer import Batch, RolloutConsumer, Stopped
from consumer.step_log import StepWriter
from consumer.weights.shared_folder import SharedFolder

log = logging.getLogger("rolloutmq.trainer")

OPTIMIZER = "optimizer.safetensors"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
    "vocab*",
    "merges*",
)


@dataclass(slots=True)
class Timing:
    """Seconds of one step, for its metrics."""

    take: float = 0.0
    train: float = 0.0
    pause: float = 0.0
    publish: float = 0.0


class Trainer:
    """Trains the run of `config` from its newest checkpoint to its last step."""

    def __init__(self, run: Run, config: TrainingConfig, model_dir: Path) -> None:
        self._run, self._config, self._model_dir = run, config, model_dir
        folder = config.run.folder
        self._checkpoints = CheckpointFolder(folder / "checkpoints")
        self._weights = SharedFolder(
            config.policy.weights_folder(config.run), keep=config.trainer.keep_weights
        )
        self._log = StepWriter(folder)
        self._evaluator = Evaluator()
        self.consumer = RolloutConsumer(run)
        tasks = {name: task.weight for name, task in config.tasks.items() if task.eval_of is None}
        self._shares = allocate(config.plan.batch_size, tasks)

    def fit(self, *, take_over: bool = False) -> bool:
        """Train until the last step, or until `consumer.stop`. Whether the last step is done.

        Raises RoleHeld, LostRun, Fenced, and what the learner raises.
        """
        self._position = self._newest_position()
        self.consumer.open(self._position.step, run_nonce=self._position.run_nonce, take_over=take_over)
        try:
            self._go_on()
            self._publish(Timing())
            self._evaluate_once()
            self._train_on()
            self._evaluate_once()
            self.consumer.finish()
        except Stopped:
            self._checkpoint()
            return False
        finally:
            self.consumer.close()
        return True

    def _go_on(self) -> None:
        """Put this trainer where its checkpoint is, and end what an earlier one had begun."""
        position = self._position
        self._checkpoints.clear(after=position.step)
        self._weights.clear()
        self._learner = self._load_learner()
        position.lineage, position.uncommitted = self.consumer.lineage, []
        if position.step:  # the last trainer may have died between its checkpoint and the commit
            self.consumer.commit(position.step, keep=self._checkpoints.steps()[0])

    # -- from where ----------------------------------------------------------

    def _newest_position(self) -> Position:
        steps = self._checkpoints.steps()
        if not steps:
            return Position(step=0, lineage="", run=self._run.name, run_nonce=self._run.nonce)
        position = self._checkpoints.read(steps[-1])
        if position.run_nonce != self._run.nonce:
            raise LostRun(
                f"the checkpoint {self._checkpoints.path(steps[-1])} belongs to another run of this name",
                hint="move the old checkpoints away, or use the server that holds that run",
            )
        log.info("resuming", extra={"step": position.step})
        return position

    def _load_learner(self) -> Learner:
        seed, step = self._config.run.seed, self._position.step
        device = _device(self._config.trainer.device)
        learner = Learner(self._model_dir, self._config.learner, device=device, seed=seed)
        if step:
            learner.load_state_tensors(self._read_state(self._checkpoints.path(step) / OPTIMIZER))
        return learner

    @staticmethod
    def _read_state(file: Path) -> dict[str, Tensor]:
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            hint = "remove this checkpoint's folder to use an older one"
            raise ModelError(f"{file} cannot be read: {error}", hint=hint) from error

    # -- one step ------------------------------------------------------------

    def _train_on(self) -> None:
        while self._position.step < self._config.plan.steps:
            if self.consumer.stopping:
                raise Stopped
            self._step(self._position.step + 1)

    def _step(self, step: int) -> None:
        timing, started = Timing(), time.monotonic()
        batch = self.consumer.take_batch(step, self._shares, waiting=_say_why)
        timing.take = batch.waited_s
        self._position.trained.add_batch(step, batch.manifest.gids)
        clock = time.monotonic()
        advantages = estimate_advantages(self._config.trainer.advantages, [g.scores for g in batch.groups])
        metrics = self._learner.train_step(batch.groups, advantages)
        timing.train = time.monotonic() - clock
        self._position.step = step
        self._position.uncommitted.append(batch.manifest.gids)
        if step % self._config.policy.sync_weights_interval == 0 or step == self._config.plan.steps:
            self._publish(timing)
        metrics |= batch_metrics(batch) | _times(timing, time.monotonic() - started)
        if peak := self._learner.peak_memory_bytes():
            metrics["memory/peak_bytes"] = float(peak)
        # before the checkpoint: a step that is in a checkpoint must be in the log, and only those of the one trainer
        self.consumer.check_role()
        self._log.add_step(step, self.consumer.lineage, batch.manifest.gids, metrics)
        log.info("step", extra={"step": step, "reward": metrics["reward/mean"]})
        if step % self._config.trainer.checkpoint_every_steps == 0 or step == self._config.plan.steps:
            self._checkpoint()

    def _publish(self, timing: Timing) -> None:
        """Write the weights first, so that workers stand still only for the switch.

        Whoever is stopped while it waits for the workers publishes nothing: the next trainer begins with that.
        """
        clock = time.monotonic()
        weights = PolicyVersion(self.consumer.lineage, self._position.step)
        path, checksum = self._weights.write(weights, partial(self._save_model, to_publish=True))
        timing.publish = time.monotonic() - clock
        try:
            timing.pause = self.consumer.pause(self._config.policy.pause_mode)
        except Stopped:
            self.consumer.continue_()
            return
        self.consumer.publish_weights(weights.version, path, checksum)
        self.consumer.continue_()
        self._weights.prune()

    def _save_model(self, folder: Path, *, to_publish: bool = False) -> None:
        self._learner.save_weights(folder, to_publish=to_publish)
        for pattern in TOKENIZER_FILES:
            for file in self._model_dir.glob(pattern):
                if not (folder / file.name).exists():
                    shutil.copy(file, folder / file.name)

    def _checkpoint(self) -> None:
        """Write a checkpoint, then commit: in this order, or a crash between the two would lose batches (I6)."""
        if self._position.step in (0, self._newest_step()) or not self._position.uncommitted:
            return
        self.consumer.check_role()
        self._position.cursors = {task: self._run.jobs.cursor(task) for task in self._run.limits.tasks}
        self._checkpoints.write(self._position, self._save_parts)
        keep = self._checkpoints.prune(self._config.trainer.keep_checkpoints)
        self.consumer.commit(self._position.step, keep=keep)
        self._position.uncommitted = []

    def _newest_step(self) -> int:
        steps = self._checkpoints.steps()
        return steps[-1] if steps else 0

    def _save_parts(self, folder: Path) -> None:
        (folder / "model").mkdir()
        self._save_model(folder / "model")
        save_file(self._learner.state_tensors(), folder / OPTIMIZER)

    # -- evaluation ----------------------------------------------------------

    def _evaluate_once(self) -> None:
        """Evaluate the weights of this step on all held-out tasks, unless a run before did."""
        if self._position.step not in (0, self._config.plan.steps):
            return
        for name, task in self._config.tasks.items():
            if task.eval_of is None or (name, self._position.step) in self._log.evaluations():
                continue
            groups = self.consumer.evaluate(name, self._config.evaluation_size(name), waiting=_say_why)
            metrics = self._evaluator.evaluate(groups)
            self._log.add_evaluation(self._position.step, name, metrics)
            log.info("evaluated", extra={"task": name, "step": self._position.step, **metrics})


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Rewards, lengths and staleness of a batch as it was taken."""
    scores = np.concatenate([group.scores for group in batch.groups])
    lengths = np.concatenate([group.lengths for group in batch.groups])
    ages = [staleness(batch.step, e.version) for e in batch.manifest.entries if e.version is not None]
    return {
        "reward/mean": float(np.nanmean(scores)),
        "reward/solved": float(np.mean([g.scores.max() > 0 for g in batch.groups])),
        "response/mean_tokens": float(lengths.mean()),
        "response/tokens": float(lengths.sum()),
        "staleness/mean": float(np.mean(ages)) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
    }


def _times(timing: Timing, total_s: float) -> dict[str, float]:
    return {
        "time/step_s": total_s,
        "time/wait_s": timing.take,
        "time/train_s": timing.train,
        "time/pause_s": timing.pause,
        "time/publish_s": timing.publish,
    }


def _say_why(reason: NotReady) -> None:
    log.debug("%s", reason)


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
