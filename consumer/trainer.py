"""The reference trainer: asynchronous GRPO on one device, restartable at any line.

Per step: take the batch, train, write a checkpoint where one is due and commit it, publish the new weights
around a pause. The position lives in the checkpoint; Redis delivers what follows it again (I5, I6).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from buffer.batch_status import ProduceBatchStatus
from buffer.errors import ExpiredBatch, LostRun, ModelError
from buffer.recovery.position import Position
from buffer.run import Run
from consumer.checkpoint import CheckpointFolder
from consumer.config import TrainingConfig
from consumer.device_share import DeviceShare
from consumer.evaluation_plan import EvaluationPlan, say_why
from consumer.learner import Learner
from consumer.metric_writers import MetricWriter, open_writers
from consumer.model_folder import copy_tokenizer
from consumer.progress_bar import ProgressBar
from consumer.publication import open_sender, published
from consumer.rollout_consumer import Batch, RolloutConsumer, Stopped
from consumer.step_log import StepWriter
from consumer.step_metrics import Throughput, Timing, batch_metrics, production_metrics
from consumer.train_controller import TrainController

log = logging.getLogger("rolloutmq.trainer")

OPTIMIZER = "optimizer.safetensors"


class Trainer:
    """Trains the run of `config` from its newest checkpoint to its last step."""

    def __init__(self, run: Run, config: TrainingConfig, model_dir: Path) -> None:
        self._run, self._config, self._model_dir = run, config, model_dir
        folder = config.run.folder
        self._checkpoints = CheckpointFolder(folder / "checkpoints")
        self._weights = open_sender(config, run)
        self._log = StepWriter(folder)
        self._writers: list[MetricWriter] = []
        self.shows_progress = False
        """draw a bar on the terminal"""
        self.consumer = RolloutConsumer(run)
        self.consumer.producer_timeout_s = config.trainer.producer_timeout_s
        launch = config.launch
        self._throughput = Throughput(len(launch.trainer_gpus or [0]), len(launch.worker_gpus or [0]))

    def fit(self, *, take_over: bool = False, regenerate: bool = False) -> bool:
        """Train until the last step, or until `consumer.stop`. Whether the last step is done.

        `regenerate`: although the server lost everything, or freed what comes after the newest checkpoint. Raises
        RoleHeld, LostRun, Fenced, and what the learner raises.
        """
        self._position = self._newest_position(regenerate)
        start = self._position.step
        self._evaluations = EvaluationPlan(self._config, self.consumer, self._log, start, self._make_room)
        self.consumer.open(position=self._position, take_over=take_over, regenerate=regenerate)
        self._run.refresh_limits()
        self._seen = self._run.read_progress()
        try:
            self._go_on()
            self._publish(Timing())
            self._evaluate()
            self._train_on()
            self._evaluations.finish()
            self.consumer.finish()
        except Stopped:
            self._checkpoint()
            return False
        finally:
            for writer in self._writers:
                writer.close()
            self._weights.close()
            self.consumer.close()
        return True

    def _go_on(self) -> None:
        """Put this trainer where its checkpoint is, and end what an earlier one had begun."""
        position = self._position
        self._checkpoints.clear(after=position.step)
        self._weights.clear()
        self._learner = self._load_learner()
        self._controller = self._make_controller()
        parts = [part.on_device() for part in (self._controller.learner, self._controller.critic) if part]
        self._share = DeviceShare(self._learner.device, parts)
        if self._is_colocated:
            self._share.sleep()
        config = self._config
        self._writers = open_writers(config.trainer.writers, config.run.folder, config.run.name, position.step + 1)
        if self.shows_progress:
            self._writers.append(ProgressBar(position.step, self._run.limits.steps))
        if position.step:  # the last trainer may have died between its checkpoint and the commit
            self.consumer.commit(position.step, keep=self._checkpoints.steps()[0])

    # -- from where ----------------------------------------------------------

    def _newest_position(self, regenerate: bool) -> Position:
        steps = self._checkpoints.steps()
        if not steps:
            return Position(step=0, lineage="", run=self._run.name, run_nonce=self._run.nonce)
        position = self._checkpoints.read(steps[-1])
        if position.run_nonce != self._run.nonce and not regenerate:
            raise LostRun(
                f"the checkpoint {self._checkpoints.path(steps[-1])} belongs to another run of this name",
                hint="move the old checkpoints away, or use the server that holds that run",
            )
        log.info("resuming", extra={"step": position.step})
        return position

    def _load_learner(self) -> Learner:
        seed, step = self._config.run.seed, self._position.step
        device = _device(self._config.trainer.device)
        learner = Learner(self._model_dir, self._config.learner, device=device, seed=seed, media=self._run.media)
        if step:
            learner.load_state_tensors(self._read_state(self._checkpoints.path(step) / OPTIMIZER))
        return learner

    def _make_controller(self) -> TrainController:
        controller = TrainController.of(self._config, self._learner, self._model_dir)
        if controller.critic and self._position.step:
            controller.load_state_tensors(self._read_state(self._checkpoints.path(self._position.step) / OPTIMIZER))
        return controller

    @staticmethod
    def _read_state(file: Path) -> dict[str, Tensor]:
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            hint = "remove this checkpoint's folder to use an older one"
            raise ModelError(f"{file} cannot be read: {error}", hint=hint) from error

    # -- one step ------------------------------------------------------------

    def _train_on(self) -> None:
        while self._position.step < self._run.limits.steps:
            if self.consumer.stopping:
                raise Stopped
            self._step(self._position.step + 1)

    def _step(self, step: int) -> None:
        timing, started = Timing(), time.monotonic()
        self._run.refresh_limits()
        batch = self._take(step, timing)
        self._position.add(batch.manifest)
        with self._devices(timing):
            clock = time.monotonic()
            metrics = self._controller.fit(batch.groups)
            timing.train = time.monotonic() - clock
            if self._is_sync_due(batch):
                self._publish(timing, is_paused=self._is_colocated)
        timing.step = time.monotonic() - started
        metrics |= batch_metrics(batch, self._controller.advantages) | self._produced(batch, timing) | timing.metrics()
        metrics |= self.consumer.pauses.metrics()
        if peak := self._learner.peak_memory_bytes():
            metrics["memory/peak_bytes"] = float(peak)
        # before the checkpoint: a step that is in a checkpoint must be in the log, and only those of the one trainer
        self.consumer.check_role()
        self._log.add_step(step, self.consumer.lineage, batch.manifest.gids, metrics)
        for writer in self._writers:
            writer.write(step, metrics)
        log.info("step", extra={"step": step, "reward": metrics.get("rewards/mean")})
        if step % self._config.trainer.checkpoint_every_steps == 0 or step == self._run.limits.steps:
            self._checkpoint()
        self._evaluations.poll()
        if self._is_sync_due(batch):
            self._evaluate()

    def _take(self, step: int, timing: Timing) -> Batch:
        """The batch of a step. Where the weights are too old to make it, newer ones go first, and it is asked again."""
        counts = self._run.limits.mix().shares(step)
        while True:
            try:
                batch = self.consumer.take_batch(step, counts, waiting=say_why, checkpoint=self._make_room)
            except ExpiredBatch as error:
                log.warning("publishing ahead of time: %s", error)
                self._publish(timing)
            else:
                timing.wait = batch.waited_s
                return batch

    def _is_sync_due(self, batch: Batch) -> bool:
        """Every so many steps, after the last one, and when the present weights can serve no further step."""
        is_expired = batch.status is ProduceBatchStatus.EXPIRED_BATCH
        is_last = batch.step == self._run.limits.steps
        return batch.step % self._config.policy.sync_weights_interval == 0 or is_last or is_expired

    @contextmanager
    def _devices(self, timing: Timing) -> Iterator[None]:
        """Training has the devices for itself: where they are shared, the run is paused, and else the learner sleeps.

        Dying in here leaves it paused; the next trainer begins with publishing its weights, and continues it.
        """
        if not self._is_colocated:
            yield
            return
        with self.consumer.paused(self._config.policy.pause_mode) as seconds:
            timing.pause = seconds
            with self._share.awake():
                yield

    @property
    def _is_colocated(self) -> bool:
        return self._config.trainer.flow == "colocated"

    def _produced(self, batch: Batch, timing: Timing) -> dict[str, float]:
        """What the workers did since the last step, and how fast both sides are."""
        before, self._seen = self._seen, self._run.read_progress()
        produced = production_metrics(before, self._seen)
        samples = sum(len(group) for group in batch.groups)
        tokens = int(sum(group.lengths.sum() for group in batch.groups))
        return produced | self._throughput.metrics(samples, tokens, timing, produced)

    def _publish(self, timing: Timing, *, is_paused: bool = False) -> None:
        """Publish the present weights, and measure them in the same pause where evaluations are exclusive.

        After `consumer.stop` it publishes or evaluates no further: the step in progress still ends, so that it is
        logged. The next trainer publishes first of all.
        """
        step, save = self._position.step, partial(self._save_model, to_publish=True)
        pause = None if is_paused else self._config.policy.pause_mode
        with suppress(Stopped), published(self.consumer, self._weights, step, save, pause=pause) as times:
            timing.publish = times.write_s
            timing.pause = timing.pause if is_paused else times.pause_s
            if self._evaluations.is_exclusive and self._evaluations.tasks(step, self._run.limits.steps):
                if self._is_colocated:
                    self._share.sleep()
                self.consumer.pause(self._config.policy.pause_mode, lanes="eval")
                self._evaluate()

    def _evaluate(self) -> None:
        """The newest weights, where that is due and was not done in the pause before."""
        self._evaluations.measure(self._position.step, self._run.limits.steps)

    def _save_model(self, folder: Path, *, to_publish: bool = False) -> None:
        self._learner.save_weights(folder, to_publish=to_publish)
        copy_tokenizer(self._model_dir, folder)

    def _checkpoint(self) -> None:
        """Write a checkpoint, then commit: in this order, or a crash between the two would lose batches (I6)."""
        step, keep = self._position.step, self._config.trainer.keep_checkpoints
        if step in (0, self._newest_step()):
            return
        self.consumer.check_role()
        self._position.forget(self._checkpoints.oldest_with(step, keep))
        self._position.cursors = {task: self._run.jobs.cursor(task) for task in self._run.limits.tasks}
        self._checkpoints.write(self._position, self._save_parts)
        self.consumer.commit(step, keep=self._checkpoints.prune(keep))

    def _make_room(self) -> None:
        """Memory is full of batches that only a checkpoint frees (I12): write one; or keep no other than the newest."""
        step, newest = self._position.step, self._newest_step()
        log.warning("memory is full of batches that are not committed: checkpoint ahead of time", extra={"step": step})
        if step > newest:
            self._checkpoint()
        elif newest:
            self.consumer.commit(newest, keep=self._checkpoints.prune(1))

    def _newest_step(self) -> int:
        steps = self._checkpoints.steps()
        return steps[-1] if steps else 0

    def _save_parts(self, folder: Path) -> None:
        (folder / "model").mkdir()
        self._save_model(folder / "model")
        save_file(self._controller.state_tensors(), folder / OPTIMIZER)


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
