"""Several ranks with FSDP2: each has its share of a batch and its shard of the weights.

Start `rolloutmq server`, `rolloutmq producer` and `rolloutmq worker` with the config, then
torchrun --nproc-per-node 2 --max-restarts 3 -m consumer.examples.fsdp_loop configs/my_run.toml

When a rank dies, torchrun stops the others and restarts all of them; the same command later does
so, too. They continue from the newest complete checkpoint, and what follows it is delivered again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from buffer.batches.position import Position
from buffer.config.config import TrainingConfig
from buffer.config.load import load_config
from buffer.control.task_status import ProduceBatchStatus
from buffer.open_run import open_store, server_url
from buffer.weights.shared_folder import FolderSender
from consumer.batches.torch_dataset import BatchDataset
from consumer.models.model_folder import copy_tokenizer
from consumer.publication import publish
from consumer.ranks import join
from consumer.sharded_consumer import ShardedConsumer
from consumer.training.checkpoint import CheckpointFolder, make_run
from consumer.training.learner import Learner
from consumer.training.saved_state import SavedState, write_state
from consumer.training.sharding import Save, write_together
from consumer.training.step_log import StepWriter
from consumer.training.train_controller import TrainController


class FsdpLoop:
    """Train on one rank; all ranks call the same methods in the same order.

    Usage:

        loop = FsdpLoop(load_config(TrainingConfig, Path("configs/my_run.toml"), []))
        loop.open()
        loop.train()
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        folder = config.run.folder
        self.model_dir = config.policy.model or folder / "model"
        store = open_store(config, server_url(config), name="rolloutmq-trainer", patient=True)
        self.run = make_run(store, config, self.model_dir, regenerate=False)
        self.consumer = ShardedConsumer(self.run)
        self.leader = self.consumer.leader
        self.ranks = self.consumer.ranks
        self.checkpoints = CheckpointFolder(folder / "checkpoints")
        self.weights = FolderSender(folder / "weights")
        self.log = StepWriter(folder)

    def open(self) -> None:
        """Continue from the newest complete checkpoint."""
        steps = self.checkpoints.steps()
        self.position = self.checkpoints.read(steps[-1]) if steps else Position()
        self.consumer.open(position=self.position, take_over=True)
        learner = Learner(
            self.model_dir,
            self.config.learner,
            device="cuda" if torch.cuda.is_available() else "cpu",
            seed=self.config.run.seed,
            ranks=self.ranks,
            media=self.run.media,
        )
        self.controller = TrainController.of(self.config, learner, self.model_dir)
        if steps:
            rows = self.controller.shard_rows()
            folder = self.checkpoints.path(steps[-1])
            with SavedState(folder, rows, self.ranks.rank) as state:
                self.controller.load_state_tensors(state)
            # the last trainer may have died between its checkpoint and the commit
            self.consumer.commit(steps[-1], keep=steps[0])

    def train(self) -> None:
        """Train to the last step of the plan."""
        self.publish(self.position.step)
        last = self.config.plan.steps
        every = self.config.trainer.checkpoint_every_steps
        interval = self.config.policy.sync_weights_interval
        shares = self.run.limits.mix().shares
        batches = BatchDataset(self.consumer, shares, first=self.position.step + 1, last=last)
        for batch in batches:
            metrics = self.controller.fit(batch.groups)
            self.position.add(batch.manifest)
            if self.leader:
                gids = batch.manifest.gids
                self.log.add_step(batch.step, self.leader.lineage, gids, metrics)
            is_last = batch.step == last
            if batch.step % every == 0 or is_last:
                self.checkpoint(batch.step)
            is_too_old = batch.status is ProduceBatchStatus.EXPIRED_BATCH
            if batch.step % interval == 0 or is_last or is_too_old:
                self.publish(batch.step)
        if self.leader:
            self.leader.finish()
        self.consumer.close()

    def checkpoint(self, step: int) -> None:
        """Write every rank's part, make the checkpoint visible, then commit it."""

        def save(folder: Path) -> None:
            self.save(folder)
            rows = self.controller.shard_rows()
            write_state(folder, self.controller.state_tensors(), rows, self.ranks)

        self.position.forget(self.checkpoints.oldest_with(step, 2))
        write_together(
            self.ranks, save, lambda save_all: self.checkpoints.write(self.position, save_all)
        )
        self.consumer.commit(step, keep=self.checkpoints.prune(2) if self.leader else 0)

    def publish(self, step: int) -> None:
        """Write the weights of all ranks, and publish them from rank 0."""

        def publish_all(save_all: Save) -> None:
            assert self.leader
            publish(self.leader, self.weights, step, save_all, pause=self.config.policy.pause_mode)

        write_together(self.ranks, self.save, publish_all)

    def save(self, folder: Path) -> None:
        """Write this rank's part of the model, on the leader with the tokenizer."""
        self.controller.learner.save_weights(folder, to_publish=True)
        if self.leader:
            copy_tokenizer(self.model_dir, folder)


if __name__ == "__main__":
    join()
    loop = FsdpLoop(load_config(TrainingConfig, Path(sys.argv[1]), sys.argv[2:]))
    loop.open()
    loop.train()
    dist.destroy_process_group()
