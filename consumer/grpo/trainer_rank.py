"""What every rank of the trainer does on the order of rank 0: load, read, train, save.

    rank 0      Trainer           decides, holds the role, talks to Redis, and gives orders
    every rank  TrainerRank       follows an order with the same arguments, in the same order

    order             on every rank
    load(step)        loads the model, its optimizer, and the state of a checkpoint
    read(batch)       reads its share of the batch
    fit()             trains one step, with the gradients of all ranks
    snapshot()        copies its part of the weights; a thread writes it into a folder of rank 0
    begin_state(...)  copies its part of a checkpoint; a thread writes it into a folder of rank 0
    sleep(), wake()   frees its device for engines, uses it again

Each order ends with an exchange. A rank that dies or fails breaks it for all others (RankLost, or
an error of torch in the middle of the order), so no rank continues alone: all processes end, and
are started again together. What rank 0 makes visible (a checkpoint, published weights, a commit)
follows the exchange of the order before, so that it is complete. A signal on any rank is noticed by
rank 0 at the end of the next order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from buffer.errors import RankLost, StepFailed
from buffer.model.manifest import Manifest
from buffer.rollouts.group import RolloutGroup
from buffer.run import Run
from buffer.weights.checksums import WrittenFiles
from buffer.weights.transport import Save
from consumer.config.training import TrainingConfig
from consumer.grpo.checkpoint import CheckpointFolder
from consumer.grpo.device_share import DeviceShare
from consumer.grpo.learner.learner import Learner
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.model_state.saved_state import SavedState, write_state
from consumer.grpo.model_state.weight_parts import WeightParts
from consumer.grpo.models.model_folder import copy_tokenizer
from consumer.grpo.reporting.metrics import BatchColumns
from consumer.handle.ranks import ALONE, Ranks, select_device
from consumer.handle.reader import NOTHING, Known, Problems
from consumer.handle.shares import BatchShares

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["TrainerRank", P], T]

END = "end"
"""The last order."""

_orders: dict[str, Callable[..., Any]] = {}


def order(method: Method[P, T]) -> Method[P, T]:
    """Make all ranks execute a method with JSON arguments when rank 0 calls it."""

    @wraps(method)
    def executed(self: TrainerRank, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._execute(method, *args, **kwargs)

    _orders[method.__name__] = executed
    return executed


class TrainerRank:
    """Represents one rank of the trainer.

    Usage:

        ranks = join()
        if ranks.rank == 0:
            Trainer(run, config, model_dir, ranks).fit()    # gives the orders, the last is `end`
        else:
            TrainerRank(run, config, model_dir, ranks).follow()
    """

    def __init__(
        self, run: Run, config: TrainingConfig, model_dir: Path, ranks: Ranks = ALONE
    ) -> None:
        self.ranks = ranks
        self.stopped = threading.Event()
        """set by a signal handler of any rank; rank 0 learns of it at the end of an order"""
        self.device = select_device(config.trainer.device, ranks)
        self._run = run
        self._config = config
        self._model_dir = model_dir
        self._shares = BatchShares(run, ranks)
        self._in_order = False
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self.parts = WeightParts(ranks, config.policy.weights_checksum)

    @property
    def vocabulary(self) -> int | None:
        """The number of the model's token ids."""
        return self._shares.reader.vocabulary

    @vocabulary.setter
    def vocabulary(self, size: int | None) -> None:
        self._shares.reader.vocabulary = size

    # -- orders in general ---------------------------------------------------------------

    def _execute(self, method: Method[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Pass an order to the other ranks, execute it, and wait until all have."""
        if self.ranks.rank == 0:
            self._check_in_step(method.__name__)
            self.ranks.share([method.__name__, args])
        self._in_order = True
        result = method(self, *args, **kwargs)
        if any(self.ranks.gather(self.stopped.is_set())):
            self.stopped.set()
        self._in_order = False
        return result

    def _check_in_step(self, name: str) -> None:
        if self._in_order and self.ranks.size > 1:
            raise StepFailed(
                f"an order to all ranks failed on rank 0, so {name} cannot follow",
                hint="start the trainer again: it continues from the newest checkpoint",
            )

    def follow(self) -> None:
        """Execute the orders of rank 0 until it ends. Raises RankLost if it is gone."""
        try:
            while True:
                name, args = self.ranks.share()
                if name == END:
                    return
                _orders[name](self, *args)
        finally:
            self.parts.close()

    def end(self) -> None:
        """Let the other ranks end; those in an order that failed notice the end of this process."""
        if not self._in_order:
            with suppress(RankLost):  # it needs no order any more
                self.ranks.share([END, []])

    # -- orders --------------------------------------------------------------------------

    @order
    def load(self, step: int) -> None:
        """Load the model, and the state of the checkpoint of `step` (0: there is none)."""
        config = self._config
        learner = Learner(
            self._model_dir,
            config.learner,
            device=self.device,
            seed=config.run.seed,
            ranks=self.ranks,
            media=self._run.media,
        )
        self.vocabulary = learner.vocabulary
        self._controller = TrainController.of(config, learner, self._model_dir)
        if step:
            folder = CheckpointFolder(config.run.folder / "checkpoints").path(step)
            with SavedState(folder, self._controller.shard_rows(), self.ranks.rank) as state:
                self._controller.load_state_tensors(state)
        trained = [part for part in (learner, self._controller.critic) if part]
        self.share = DeviceShare(learner.device, [part.on_device() for part in trained])
        if config.trainer.flow == "colocated":
            self.share.sleep()

    def read(
        self, manifest: Manifest, known: Known = NOTHING
    ) -> tuple[list[RolloutGroup], Problems]:
        """Read the shares of all ranks: the reader of the trainer's `RolloutConsumer`."""
        if self.ranks.size == 1:
            self._shares.groups, problems = self._shares.reader.read(manifest, known)
        else:
            problems = self.read_share(*self._shares.plan(manifest))
        return self._shares.groups, problems

    @order
    def read_share(self, step: int, lines: list[str], shares: list[list[int]]) -> Problems:
        """Read this rank's share of a batch; see `BatchShares.read`."""
        return self._shares.read(step, lines, shares)

    @order
    def fit(self) -> tuple[dict[str, float], BatchColumns]:
        """Train on the batch that was read.

        Returns the metrics of the learner and the filter, and the columns of the whole batch.
        Raises GroupChanged on all ranks where a group is not what the server sent any more.
        """
        groups = self._shares.groups
        try:
            metrics = self._controller.fit(groups)
        except Exception:  # lengths that have changed fail a step in many ways
            self._shares.check_own()
            raise
        self._shares.check_unchanged()
        counts = [name for name in metrics if name.startswith("filtered/")]
        totals = self.ranks.sum([metrics[name] for name in counts])
        metrics |= dict(zip(counts, totals, strict=True))
        peak = self.ranks.max(self._controller.learner.peak_memory_bytes() or 0)
        if peak:
            metrics["memory/peak_bytes"] = float(peak)
        own = BatchColumns.of(groups, self._controller.advantages)
        return metrics, BatchColumns.join(self.ranks.gather(own.lists()))

    @order
    def snapshot(self) -> Save:
        """Copy the weights, as workers load them, to host memory.

        Returns, on rank 0, what writes the copies of all ranks into a folder, in any thread, until
        the next snapshot.
        """
        self.parts.begin(self._controller.learner.snapshot(to_publish=True))
        return self._write_parts

    def _write_parts(self, folder: Path) -> WrittenFiles:
        copy_tokenizer(self._model_dir, folder)
        return self.parts.write(folder)

    @order
    def meet(self) -> None:
        """Raise RankLost if a rank is gone."""

    @order
    def begin_state(self, folder: str) -> None:
        """Copy what a resume needs to host memory, and write this rank's part in a thread."""
        controller = self._controller
        rows = controller.shard_rows()
        part = (Path(folder), controller.state_tensors(), rows, self.ranks)
        self._writing = self._writer.submit(write_state, *part)

    @order
    def is_state_written(self) -> bool:
        """Return whether the threads of all ranks have ended."""
        return all(self.ranks.gather(self._writing.done()))

    @order
    def end_state(self) -> None:
        """Wait until this rank's part is on disk. Raises what the thread raised."""
        self._writing.result()

    @order
    def sleep(self) -> None:
        """Free the device for the engines."""
        self.share.sleep()

    @order
    def wake(self) -> None:
        """Take the device back."""
        self.share.wake()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let all ranks use their devices for the duration of the context."""
        self.wake()
        try:
            yield
        finally:
            if not self._in_order:
                self.sleep()
