"""What every rank of the trainer does on the order of rank 0: load, train, save.

rank 0      Trainer           decides, holds the role, talks to Redis, and gives orders
every rank  TrainerRank       executes an order with the same arguments, in the same order

Each order ends with an exchange of all ranks (`handle/ranks.py`), after which rank 0 makes its
result visible: a checkpoint, published weights, a commit. So it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from buffer.run.run import Run
from buffer.weights.checksums import WrittenFiles
from buffer.weights.transport import Save
from buffer.wire.group import RolloutGroup
from consumer.config.trainer import TrainingConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.model_state.saved_state import SavedState, write_state
from consumer.grpo.model_state.weights_folder import WeightParts
from consumer.grpo.models.model_folder import copy_tokenizer
from consumer.grpo.policy.policy import Policy
from consumer.grpo.reporting.metric_writers import choose
from consumer.grpo.reporting.metrics import BatchColumns
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.ranks import ALONE, RankOrders, Ranks, on_all_ranks, select_device
from consumer.handle.sample_tokens import Packed, pack
from consumer.handle.sharded_consumer import ShareReader, check_unchanged


class TrainerRank:
    def __init__(
        self, run: Run, config: TrainingConfig, model_dir: Path, ranks: Ranks = ALONE
    ) -> None:
        self.ranks = ranks
        self.device = select_device(config.trainer.device, ranks)
        self._run = run
        self._config = config
        self._model_dir = model_dir
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self.parts = WeightParts(ranks)
        self.orders = RankOrders(ranks)
        self.orders.add("trainer", self)
        self.reader = ShareReader(run, self.orders)

    def follow(self) -> None:
        """Execute the orders of rank 0 until it ends. Raises RankLost if it is gone."""
        try:
            self.orders.follow()
        finally:
            self.parts.close()

    @on_all_ranks
    def load(self, step: int) -> None:
        """Load the model, and the state of the checkpoint of `step` (0: none)."""
        config = self._config
        policy = Policy(
            self._model_dir,
            config.learner,
            device=self.device,
            seed=config.run.seed,
            ranks=self.ranks,
            columns=self._run.columns,
        )
        self.reader.vocabulary = policy.vocabulary
        self.controller = TrainController.of(config, policy, self._model_dir)
        if step:
            folder = CheckpointFolder(config.run.folder / "checkpoints").path(step)
            with SavedState(folder, self.controller.shard_rows(), self.ranks.rank) as state:
                self.controller.load_state_tensors(state)
        if config.trainer.flow == "colocated":
            self.controller.sleep()

    @on_all_ranks
    def fit(
        self, step: int, *, groups: Sequence[RolloutGroup] | None = None
    ) -> tuple[dict[str, float], BatchColumns, dict[str, list[Packed]]]:
        """Train one step: rank 0 on `groups`, the others on their shares of the same batch.

        Returns the metrics of learner and filter, the columns of the whole batch, and the scores of
        each rollout of the groups that the sample log gets. Raises
        GroupChanged on all ranks if a group is not what the server sent.
        """
        own = self.reader.share(step) if groups is None else groups
        try:
            metrics = self.controller.fit(own)
        except Exception:  # lengths that have changed fail a step in many ways
            for group in own:
                group.check_unchanged()
            raise
        check_unchanged(own, self.ranks)
        counts = [name for name in metrics if name.startswith("filtered/")]
        totals = self.ranks.sum([metrics[name] for name in counts])
        metrics |= dict(zip(counts, totals, strict=True))
        device = self.controller.policy.device
        used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        if peak := self.ranks.max(used):
            metrics["memory/peak_bytes"] = float(peak)
        columns = BatchColumns.of(own, self.controller.advantages, self.controller.fates)
        columns = BatchColumns.join(self.ranks.gather(columns.lists()))
        section = self._config.samples
        chosen = choose(columns, section.groups_per_step, self._config.run.seed, step)
        scores = self.controller.take_scores(chosen)
        packed = {
            group.gid: pack(scores[group.gid], group.lengths, section.tokens_per_rollout)
            for group in own
            if group.gid in scores
        }
        parts = self.ranks.gather(packed)
        return metrics, columns, {gid: found for part in parts for gid, found in part.items()}

    @on_all_ranks
    def snapshot(self) -> Save:
        """Copy the weights, as workers load them, to host memory until the next snapshot.

        Returns, on rank 0, what writes the copies of all ranks into a folder, in any thread.
        """
        self.parts.begin(self.controller.policy.snapshot(to_publish=True))
        return self._write_parts

    def _write_parts(self, folder: Path) -> WrittenFiles:
        copy_tokenizer(self._model_dir, folder)
        return self.parts.write(folder)

    @on_all_ranks
    def meet(self) -> None:
        """Raise RankLost if a rank is gone."""

    @on_all_ranks
    def begin_state(self, folder: str) -> None:
        """Copy what a resume needs to host memory, and write this rank's part in a thread."""
        controller = self.controller
        rows = controller.shard_rows()
        part = (Path(folder), controller.state_tensors(), rows, self.ranks)
        self._writing = self._writer.submit(write_state, *part)

    @on_all_ranks
    def is_state_written(self) -> bool:
        """Return whether the threads of all ranks have ended."""
        return all(self.ranks.gather(self._writing.done()))

    @on_all_ranks
    def end_state(self) -> None:
        """Wait until this rank's part is on disk. Raises what the thread raised."""
        self._writing.result()

    @on_all_ranks
    def sleep(self) -> None:
        """Give the device to the engines, which it is shared with.

        engines   awake ──pause: confirmed as asleep──▶ asleep ───────────── continue ──▶ awake
        trainer   asleep ────────────────────────────▶ awake: train, save, publish ──▶ asleep

        The side that sleeps keeps its weights in host memory, so the device never holds both.
        """
        self.controller.sleep()

    @on_all_ranks
    def wake(self) -> None:
        self.controller.wake()
