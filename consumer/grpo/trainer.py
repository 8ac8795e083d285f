"""The reference trainer: asynchronous GRPO on one rank or many, restartable at any line.

A train step is `Trainer._step`, read downwards:
    take         the batch, and wait for it: `RolloutConsumer.take_batch`
    fit          filter, pack, advantages, losses, optimizer: `TrainController.fit`, on every rank
                 through `TrainerRank.fit`
    publish      copy the weights, which workers get beside the next step: `Publisher`
    report       metrics: to the server, and to the `Reporter`, which writes the run's logs
    checkpoint   begun where due; threads write it beside the next step
    commit       once it is written. It holds the position; Redis delivers again what follows it
                 (I5, I6)

Rank 0 runs this code; the others call `TrainerRank.follow`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from buffer.control.length_counts import LengthCounts, count, length_bias
from buffer.errors import ExpiredBatch
from buffer.ids import split_group_id
from buffer.ledger.position import Position
from buffer.manifest import Manifest
from buffer.run.run import Run
from buffer.run.settings import KeptSettings
from buffer.wire.staleness import staleness
from consumer.config.trainer import TrainingConfig
from consumer.grpo.evaluation import EvaluationPlan, log_wait_reason
from consumer.grpo.reporting.metric_writers import ProgressBar, open_writers
from consumer.grpo.reporting.metrics import (
    BatchColumns,
    Throughput,
    Timing,
    production_metrics,
    staleness_metrics,
)
from consumer.grpo.reporting.reporter import Reporter
from consumer.grpo.trainer_rank import TrainerRank
from consumer.handle.batch import Batch, Stopped
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.publication import Publisher, open_sender, published
from consumer.handle.ranks import ALONE, Ranks
from consumer.handle.rollout_consumer import PREFETCH_BYTES, RolloutConsumer

log = logging.getLogger("rolloutmq.trainer")


class Trainer:
    """Trains the run of `config` from its newest checkpoint to its last step; rank 0 of `ranks`."""

    def __init__(
        self,
        run: Run,
        config: TrainingConfig,
        model_dir: Path,
        ranks: Ranks = ALONE,
        *,
        terms: str = "",
    ) -> None:
        """`terms`: digest of what batches are trained under, for the checkpoints."""
        self._run = run
        self._terms = terms
        self._config = config
        self.rank = TrainerRank(run, config, model_dir, ranks)
        folder = config.run.folder
        self._checkpoints = CheckpointFolder(folder / "checkpoints")
        # the checkpoint in progress, and its hidden folder
        self._begun: tuple[Position, Path] | None = None
        self._kept_settings = KeptSettings(folder, run.nonce)
        self._is_colocated = config.trainer.flow == "colocated"
        self._weights = open_sender(config, run)
        self._reporter = Reporter(config, run.buffer, model_dir)
        self.shows_progress = False
        # what rank 0 reads ahead of the take would be mostly the shares of others
        ahead = PREFETCH_BYTES if ranks.size == 1 else 0
        self.consumer = RolloutConsumer(run, prefetch_bytes=ahead, reader=self.rank.reader)
        self.consumer.producer_timeout_s = config.trainer.producer_timeout_s
        self._publisher = Publisher(self.consumer, self._weights, config.policy.pause_mode)
        self._newest_weights = 0  # step of the newest weights that are published or begun
        self._lengths = LengthCounts()  # of the responses that were taken
        self._unchecked_roles = dict(config.train_roles)  # of tasks without a batch so far
        self._throughput = Throughput(ranks.size, config.worker_gpus)

    def fit(self, *, take_over: bool = False, regenerate: bool = False) -> bool:
        """Train until the last step or `consumer.stop`; return whether the last step is done.

        `take_over`: also while another trainer holds the role. `regenerate`: also where the server
        lost the run, or freed batches after the newest checkpoint. Raises RoleHeld, LostRun,
        Fenced, and what the learner raises.
        """
        self._run.observers.append(self._reporter)
        try:
            return self._fit(take_over=take_over, regenerate=regenerate)
        finally:
            self._run.observers.remove(self._reporter)
            self.rank.orders.end()

    def _fit(self, *, take_over: bool, regenerate: bool) -> bool:
        found = self._checkpoints.newest_whole()
        if found:
            log.info("resuming", extra={"step": found.step})
        self._position = found or Position(
            step=0, lineage="", run=self._run.name, run_nonce=self._run.nonce
        )
        self._position.set_terms(self._terms)
        self._evaluations = EvaluationPlan(
            self._config,
            self._run.limits.eval_tasks,
            self.consumer,
            self._position.step,
            self._free_memory,
        )
        self.consumer.open(position=self._position, take_over=take_over, regenerate=regenerate)
        self._refresh_settings()
        self._progress = self._run.read_progress()
        try:
            self._resume()
            self._publish(Timing())
            self._await_publication()
            self._evaluate()
            while self._position.step < self._run.limits.steps:
                if self.rank.orders.stopped.is_set() or self.consumer.stopping:
                    self.stop()
                    raise Stopped
                self._step(self._position.step + 1)
            self._await_publication()
            self._evaluations.finish()
            self._commit()
            self.consumer.finish()
        except Stopped:
            self._checkpoint()
            self._commit()
            return False
        finally:
            self._reporter.close()
            self.rank.parts.close()
            self._publisher.close()
            self._weights.close()
            self.consumer.close()
        return True

    def stop(self) -> None:
        """End the step in progress, write a checkpoint, and return from `fit`. For signals."""
        self.rank.orders.stopped.set()
        self.consumer.stop()

    def _resume(self) -> None:
        """Load the checkpoint's state, and complete what an earlier trainer had begun."""
        position = self._position
        self._checkpoints.clear(after=position.step)
        self._weights.clear()
        self.rank.load(position.step)
        writers = open_writers(self._config, position.step + 1)
        if self.shows_progress:
            writers.append(ProgressBar(position.step, self._run.limits.steps))
        self._reporter.open(writers)
        if position.step:
            # the last trainer may have died between its checkpoint and the commit
            self.consumer.commit(position.step, keep=self._checkpoints.steps()[0])

    def _step(self, step: int) -> None:
        timing = Timing()
        started = time.monotonic()
        self._refresh_settings()
        self._commit_if_written()
        self._publisher.check()
        batch = self._take(step, timing)
        last = self._run.limits.steps
        with self._devices(timing):
            # behind the pause: a stop while it waits writes a checkpoint of this position
            self._position.add(batch.manifest)
            train_started = time.monotonic()
            metrics, columns, scores = self.rank.fit(step, groups=batch.groups)
            self.consumer.delivered.clear()  # every rank has compared its own
            for problem in columns.missing_roles(self._unchecked_roles):
                log.error(problem)
            for gid in columns.gids:
                self._unchecked_roles.pop(split_group_id(gid)[0], None)
            timing.train = time.monotonic() - train_started
            interval = self._config.policy.sync_weights_interval
            is_too_old = self._is_too_old(self._newest_weights, step + 1)
            if step % interval == 0 or step == last or is_too_old:
                self._publish(timing, is_paused=self._is_colocated)
        timing.step = time.monotonic() - started
        metrics |= self._step_metrics(batch.manifest, columns, timing)
        # before the checkpoint: a step in a checkpoint must be in the log, and only this trainer's
        self._reporter.histograms = columns.histograms()
        self.consumer.report(step, metrics)
        self._reporter.add_samples(batch.manifest, columns, batch.groups, scores)
        log.info("step", extra={"step": step, "reward": metrics.get("rewards/mean")})
        if step % self._config.trainer.checkpoint_every_steps == 0 or step == last:
            self._checkpoint()
        self._evaluations.poll()
        self._commit_if_written()
        if self._newest_weights == step:
            self._evaluate()

    def _refresh_settings(self) -> None:
        """Adopt changed settings; keep them in the run's folder, as the server may lose them."""
        self._run.refresh_limits()
        self._kept_settings.keep(self._run.settings)

    def _take(self, step: int, timing: Timing) -> Batch:
        """Take the batch of a step. If the newest weights are too old for it, publish first."""
        counts = self._run.limits.mix().shares(step)
        if self._is_too_old(self._publisher.published, step):
            self._await_publication()
        while True:
            started = time.monotonic()
            try:
                batch = self.consumer.take_batch(
                    step, counts, waiting=log_wait_reason, checkpoint=self._free_memory
                )
            except ExpiredBatch as error:
                if self._publisher.is_pending:
                    self._await_publication()
                    continue
                log.warning("publishing weights before they are due: %s", error)
                self._publish(timing)
            else:
                timing.wait = batch.waited_s
                timing.read = max(0.0, time.monotonic() - started - batch.waited_s)
                return batch

    def _is_too_old(self, version: int, step: int) -> bool:
        return staleness(step, version) >= self._run.limits.horizon_of(step)

    @contextmanager
    def _devices(self, timing: Timing) -> Iterator[None]:
        """Give the devices to the learner; if they are shared, pause the run meanwhile.

        A trainer that dies in here leaves the run paused; the next one publishes, then continues
        it.
        """
        if not self._is_colocated:
            yield
            return
        with self.consumer.paused(self._config.policy.pause_mode) as seconds:
            timing.pause = seconds
            self.rank.wake()
            try:
                yield
            finally:
                if not self.rank.orders.is_in_order:
                    self.rank.sleep()

    def _step_metrics(
        self, manifest: Manifest, batch: BatchColumns, timing: Timing
    ) -> dict[str, float]:
        before = self._progress
        self._progress = self._run.read_progress()
        produced = production_metrics(before, self._progress)
        started = self._run.fleet.response_lengths()
        for (task, fate), lengths in batch.lengths_by_fate().items():
            self._lengths.add(task, fate, lengths, window=count(started.get(task, {})))
        return {
            **length_bias(self._lengths.by_task(), started),
            **batch.metrics(),
            **(batch.rewards_by_task() if len(self._run.limits.training_tasks) > 1 else {}),
            **staleness_metrics(manifest),
            **produced,
            **self._throughput.metrics(len(batch.lengths), batch.tokens, timing, produced),
            **timing.metrics(),
            **self.consumer.pause_metrics(),
        }

    def _publish(self, timing: Timing, *, is_paused: bool = False) -> None:
        """Copy the weights, and publish the copy in the background.

        Waits for it if the run is paused for it or exclusive evaluations are due. After
        `consumer.stop` publishes nothing: the next trainer publishes first.
        """
        started = time.monotonic()
        step, last = self._position.step, self._run.limits.steps
        pause = self._config.policy.pause_mode
        with suppress(Stopped):
            self._await_publication()
            save = self.rank.snapshot()
            self._newest_weights = step
            evaluates = self._evaluations.is_exclusive and bool(self._evaluations.tasks(step, last))
            if not (is_paused or evaluates):
                self._publisher.begin(step, save)
            else:
                own_pause = None if is_paused else pause
                with published(self.consumer, self._weights, step, save, pause=own_pause) as times:
                    timing.pause = timing.pause if is_paused else times.pause_s
                    if evaluates:
                        if self._is_colocated:
                            self.rank.sleep()
                        self.consumer.pause(pause, lanes="eval")
                        self._evaluate()
        timing.publish = time.monotonic() - started - (0.0 if is_paused else timing.pause)

    def _await_publication(self) -> None:
        while not self._publisher.is_done(wait_s=1.0):
            self.rank.meet()
        self._publisher.finish()

    def _evaluate(self) -> None:
        """Evaluate the newest weights where due, unless the pause did."""
        step = self._position.step
        last = self._run.limits.steps
        if self._evaluations.tasks(step, last):
            self._await_publication()
            self._evaluations.measure(step, last)

    def _checkpoint(self) -> None:
        """Commit the last checkpoint, then begin one of the newest step, which threads write."""
        step = self._position.step
        newest = self._begun[0].step if self._begun else max(self._checkpoints.steps(), default=0)
        if step in (0, newest):
            return
        self._commit()
        self.consumer.check_role()
        keep = self._config.trainer.keep_checkpoints
        self._position.forget(self._checkpoints.oldest_with(step, keep))
        self.consumer.note_draws(self._position)
        self._begun = (self._position.model_copy(deep=True), self._checkpoints.begin(step))
        self.rank.begin_state(str(self._begun[1]))

    def _commit(self) -> None:
        """Make the checkpoint visible, then commit it: otherwise a crash loses batches (I6)."""
        if self._begun is None:
            return
        position, folder = self._begun
        self.rank.end_state()
        # no later trainer reports the steps of this checkpoint
        self._reporter.flush()
        self.consumer.check_role()
        self._checkpoints.complete(position, folder)
        self._begun = None
        keep = self._config.trainer.keep_checkpoints
        self.consumer.commit(position.step, keep=self._checkpoints.prune(keep))

    def _commit_if_written(self) -> None:
        if self._begun and self.rank.is_state_written():
            self._commit()

    def _free_memory(self) -> None:
        """Free batches that only a checkpoint frees (I12): write one, or keep only the newest."""
        message = "memory is full of batches that are not committed: writing a checkpoint now"
        log.warning(message, extra={"step": self._position.step})
        newest = self._checkpoints.steps()[-1:]
        self._checkpoint()
        if self._begun:
            self._commit()
        elif newest:
            self.consumer.commit(newest[0], keep=self._checkpoints.prune(1))
