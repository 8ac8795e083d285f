"""A trainer's handle that publishes, takes, checkpoints and commits by itself.

    with CheckpointedConsumer(run, folder) as consumer:
        model = load(consumer.checkpoint or model_dir)
        for batch in consumer.steps(model.save_pretrained):
            train(model, batch)

The body of the loop trains one step. The step counts when the loop asks for the next batch, and
only then: its groups enter the position, the checkpoint is written, the step committed.

the process dies, or the loop is left   the next process
  while weights are published             publishes those of its checkpoint, under a new lineage
  in the take, or in the body             takes the same groups, byte for byte
  while the checkpoint is written         the same, from the checkpoint before
  between checkpoint and commit           commits that checkpoint
  after the commit                        publishes its weights, then takes the next step
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from buffer.errors import ConfigError, LedgerError
from buffer.ledger.position import Position
from buffer.run.run import Run
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import Save, WeightsSender
from consumer.handle.batch import Batch, Stopped
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.publication import publish
from consumer.handle.rollout_consumer import PauseMode, RolloutConsumer
from consumer.handle.taker import Waiting

log = logging.getLogger("rolloutmq.trainer")


class CheckpointedConsumer(RolloutConsumer):
    """The trainer of a run in one process, with its checkpoints and weights in `folder`.

    The block opens it from the newest checkpoint, and closes it. It finishes the run, so that
    workers and producer exit, if the last step was trained and the block raised nothing.
    `take_over` fences a live trainer. `sender`: default: a folder that the workers share
    (`folder/weights`). `keep`: checkpoints to keep, at least 1.

    Raises as `RolloutConsumer.open`, and ConfigError in one of several ranks.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        *,
        take_over: bool = False,
        sender: WeightsSender | None = None,
        keep: int = 2,
    ) -> None:
        if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ConfigError(
                f"this trainer has {ranks} ranks (WORLD_SIZE), and CheckpointedConsumer serves one",
                hint="use ShardedConsumer, which gives each rank its share of a batch "
                "(docs/pages/your_trainer.md), or the reference trainer",
            )
        super().__init__(run)
        folder.mkdir(parents=True, exist_ok=True)
        self._checkpoints = CheckpointFolder(folder / "checkpoints")
        self._sender = sender or FolderSender(folder / "weights")
        self._take_over = take_over
        self._keep = keep
        self._position = Position()
        self._in_body = 0  # the step that the loop's body trains; 0: none
        self._ends_run = False

    def __enter__(self) -> Self:
        steps = self._checkpoints.steps()
        if steps:
            self._position = self._checkpoints.read(steps[-1])
        self.open(position=self._position, take_over=self._take_over)
        try:
            # only now: an earlier trainer is fenced, and no longer needs what it was writing
            self._checkpoints.clear(after=self._position.step)
            self._sender.clear()
            if steps:  # the last trainer may have died between its checkpoint and the commit
                self.commit(steps[-1], keep=steps[0])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._ends_run and kind is None:
                self.finish()
        finally:
            self._sender.close()
            self.close()

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the newest checkpoint, which holds what `save` wrote. None: no step yet."""
        return self._checkpoints.path(self._position.step) if self._position.step else None

    def steps(
        self,
        save: Save,
        *,
        save_state: Save | None = None,
        checkpoint_every: int = 1,
        pause: PauseMode = "keep",
        waiting: Waiting | None = None,
    ) -> Iterator[Batch]:
        """Yield the batch of each step that is left, and publish the weights before each take.

        `save(folder)` writes the model as workers load it, for publications and checkpoints;
        `save_state(folder)` adds to a checkpoint what else a restart needs, as an optimizer.
        `checkpoint_every`: steps between two checkpoints, which a restart repeats at most. `pause`:
        what workers do with running groups while they load. `waiting` as in `take_batch`.

        A step whose body ends by `break`, `return` or an exception is in no checkpoint: the next
        process takes it again. `stop` ends the loop after the step in progress. The weights of the
        last step are published when the loop ends, for evaluations behind it.

        Raises as `take_batch`, `commit` and `publish`; AccountError before a group enters the
        checkpoint twice; LedgerError if an earlier loop of this process was left in a step.
        """
        if self._in_body:
            raise LedgerError(
                f"an earlier loop was left in step {self._in_body}, so the weights in memory may "
                "hold a part of that step",
                hint="start the process again: it continues from the newest checkpoint; to end "
                "after a step, call `consumer.stop()` in the body instead of `break`",
            )

        def save_all(folder: Path) -> None:
            save(folder)
            if save_state:
                save_state(folder)

        position, limits = self._position, self._run.limits
        while not self.stopping:
            try:
                publish(self, self._sender, position.step, save, pause=pause)
                if position.step >= limits.steps:
                    self._ends_run = True
                    return
                step = position.step + 1
                batch = self.take_batch(
                    step,
                    limits.mix().shares(step),
                    waiting=waiting,
                    checkpoint=lambda: self._free_memory(save_all),
                )
            except Stopped:
                break
            self._in_body = step
            yield batch
            self._in_body = 0
            position.add(batch.manifest)
            del batch  # its bytes, before the next take
            if step % checkpoint_every == 0 or step >= limits.steps:
                self._write(save_all, self._keep)
        # stopped: what was trained since the newest checkpoint would be trained again
        if position.step not in (0, *self._checkpoints.steps()):
            self._write(save_all, self._keep)

    def _write(self, save: Save, keep: int) -> None:
        """Write a checkpoint of the position, then commit it: otherwise a crash loses batches."""
        position = self._position
        self.check_role()  # a trainer that was replaced leaves the folder alone
        position.forget(self._checkpoints.oldest_with(position.step, keep))
        self.note_draws(position)
        self._checkpoints.write(position, save)
        self.commit(position.step, keep=self._checkpoints.prune(keep))

    def _free_memory(self, save: Save) -> None:
        """Free batches that only a checkpoint frees (I12): write one, or keep only the newest."""
        step = self._position.step
        log.warning("memory is full of batches that are not committed", extra={"step": step})
        if step not in (0, *self._checkpoints.steps()):
            self._write(save, self._keep)
        elif step:
            self.commit(step, keep=self._checkpoints.prune(1))
