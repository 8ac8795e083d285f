"""Run as a program: the same three train steps by one rank, by two, and by two with a restart.

argv: a model folder and one to work in. Each life writes `<folder>/<life>-<rank>.json`: the metrics
of its steps. The checkpoint of the first two ranks goes to `<folder>/state`, their weights to
`<folder>/weights`. Forks, so that torch is loaded once; the parent computes nothing.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import orjson
import torch
import torch.distributed as dist

from buffer.config.learner import LearnerConfig, LossConfig
from buffer.rollouts.group import RolloutGroup
from consumer.ranks import ALONE, Ranks, balanced_shares
from consumer.training.learner import Learner
from consumer.training.saved_state import SavedState, write_state
from consumer.training.train_controller import TrainController
from tests.consumer.models.tiny import make_group

STEPS = 3
RANKS = 2
CUT = 2
CONFIG = LearnerConfig(
    learning_rate=1e-3,
    token_budget=24,  # several micro-batches, and not as many on each rank
    updates_per_batch=2,
    gradient_checkpointing=True,
    loss=LossConfig(kl_coef=0.05, entropy_coef=0.01),
)


def groups_of(step: int, rank: int, ranks: int) -> list[RolloutGroup]:
    batch = [make_group(100 * step + i, prompt=3 + 2 * i, lengths=(3, 9, 1, 4)) for i in range(6)]
    # by optimizer step, as one rank cuts it: the updates of a batch hold the same groups however
    # many ranks there are
    halves = [batch[:3], batch[3:]]
    own: list[RolloutGroup] = []
    for half in halves:
        share = balanced_shares([int(group.lengths.sum()) for group in half], ranks)[rank]
        own += [half[position] for position in share]
    return own


def train(folder: Path, model: Path, name: str, ranks: Ranks, first: int, last: int) -> None:
    learner = Learner(model, CONFIG, seed=7, ranks=ranks)
    controller = TrainController(learner, advantages="reinforce_pp")  # sees the scores of all ranks
    if first > 1:
        with SavedState(folder / "state", controller.shard_rows(), ranks.rank) as state:
            controller.load_state_tensors(state)
    metrics = []
    for step in range(first, last + 1):
        metrics.append(controller.fit(groups_of(step, ranks.rank, ranks.size)))
        if step == CUT and ranks.size > 1 and first == 1:
            rows = controller.shard_rows()
            write_state(folder / "state", controller.state_tensors(), rows, ranks)
    learner.save_weights(folder / "weights" / name)
    (folder / f"{name}-{ranks.rank}.json").write_bytes(orjson.dumps(metrics))


def in_ranks(folder: Path, model: Path, name: str, first: int) -> Callable[[int], None]:
    def rank_of(rank: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=RANKS
        )
        train(folder, model, name, Ranks(dist.group.WORLD), first, STEPS)
        dist.barrier()

    return rank_of


def fork(work: Callable[[], None]) -> int:
    if child := os.fork():
        return child
    try:
        torch.set_num_threads(1)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main(model: Path, folder: Path) -> None:
    for name in ("one", "two", "resumed"):
        (folder / "weights" / name).mkdir(parents=True)
    (folder / "state").mkdir()
    ends = [os.waitpid(fork(lambda: train(folder, model, "one", ALONE, 1, STEPS)), 0)[1]]
    for name, first in (("two", 1), ("resumed", CUT + 1)):
        work = in_ranks(folder, model, name, first)
        children = [fork(lambda rank=rank, work=work: work(rank)) for rank in range(RANKS)]  # type: ignore[misc]
        ends += [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
