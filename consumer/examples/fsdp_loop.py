"""Several ranks with FSDP2: every rank reads its share of a batch, holds its shard of the weights, writes its part.

rolloutmq server, rolloutmq producer and rolloutmq worker of the config run already; then
torchrun --nproc-per-node 2 --max-restarts 3 -m consumer.examples.fsdp_loop configs/my_run.toml

When a rank dies, torchrun ends the others and starts all again; so does the same command later. They go on from the
newest checkpoint that is whole, and what came after it is delivered again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from buffer import ProduceBatchStatus
from buffer.config.loader import load_config
from buffer.open_run import open_store, server_url
from buffer.recovery.position import Position
from buffer.weights.shared_folder import FolderSender
from consumer.batch_dataset import BatchDataset
from consumer.checkpoint import CheckpointFolder
from consumer.config import TrainingConfig
from consumer.launch.preparation import make_run
from consumer.learner import Learner
from consumer.model_folder import copy_tokenizer
from consumer.publication import publish
from consumer.ranks import join
from consumer.sharded_consumer import ShardedConsumer
from consumer.sharded_writing import Save, write_together
from consumer.step_log import StepWriter
from consumer.train_controller import TrainController


class FsdpLoop:
    """One rank; all ranks call the same methods."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config, folder = config, config.run.folder
        self.model_dir = config.policy.model or folder / "model"
        store = open_store(config, server_url(config), name="rolloutmq-trainer", patient=True)
        self.run = make_run(store, config, self.model_dir, regenerate=False)
        self.consumer = ShardedConsumer(self.run)
        self.leader, self.ranks = self.consumer.leader, self.consumer.ranks
        self.checkpoints, self.weights = CheckpointFolder(folder / "checkpoints"), FolderSender(folder / "weights")
        self.log, self.state = StepWriter(folder), f"optimizer-{self.ranks.rank:05d}.safetensors"

    def open(self) -> None:
        """From the newest checkpoint that is whole."""
        steps = self.checkpoints.steps()
        self.position = self.checkpoints.read(steps[-1]) if steps else Position()
        self.consumer.open(position=self.position, take_over=True)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        seed = self.config.run.seed
        config, media = self.config.learner, self.run.media
        learner = Learner(self.model_dir, config, device=device, seed=seed, ranks=self.ranks, media=media)
        self.controller = TrainController.of(self.config, learner, self.model_dir)
        if steps:
            self.controller.load_state_tensors(load_file(self.checkpoints.path(steps[-1]) / self.state))
            self.consumer.commit(steps[-1], keep=steps[0])  # it may have died just before

    def train(self) -> None:
        self.publish(self.position.step)
        last, every = self.config.plan.steps, self.config.trainer.checkpoint_every_steps
        interval = self.config.policy.sync_weights_interval
        counts = self.run.limits.mix().shares
        for batch in BatchDataset(self.consumer, counts, first=self.position.step + 1, last=last):
            metrics = self.controller.fit(batch.groups)
            self.position.add(batch.manifest)
            if self.leader:
                self.log.add_step(batch.step, self.leader.lineage, batch.manifest.gids, metrics)
            if batch.step % every == 0 or batch.step == last:
                self.checkpoint(batch.step)
            is_too_old = batch.status is ProduceBatchStatus.EXPIRED_BATCH
            if batch.step % interval == 0 or batch.step == last or is_too_old:
                self.publish(batch.step)
        if self.leader:
            self.leader.finish()
        self.consumer.close()

    def checkpoint(self, step: int) -> None:
        """Every rank writes its part; then it becomes visible; then it is committed."""

        def save(folder: Path) -> None:
            self.save(folder)
            save_file(self.controller.state_tensors(), folder / self.state)

        self.position.forget(self.checkpoints.oldest_with(step, 2))
        write_together(self.ranks, save, lambda save_all: self.checkpoints.write(self.position, save_all))
        self.consumer.commit(step, keep=self.checkpoints.prune(2) if self.leader else 0)

    def publish(self, step: int) -> None:
        """Every rank writes its part; rank 0 publishes the whole."""

        def publish_all(save_all: Save) -> None:
            assert self.leader
            publish(self.leader, self.weights, step, save_all, pause=self.config.policy.pause_mode)

        write_together(self.ranks, self.save, publish_all)

    def save(self, folder: Path) -> None:
        self.controller.learner.save_weights(folder, to_publish=True)
        if self.leader:
            copy_tokenizer(self.model_dir, folder)


if __name__ == "__main__":
    join()
    loop = FsdpLoop(load_config(TrainingConfig, Path(sys.argv[1]), sys.argv[2:]))
    loop.open()
    loop.train()
    dist.destroy_process_group()
