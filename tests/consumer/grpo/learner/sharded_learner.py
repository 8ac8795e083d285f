"""A program: lives of a trainer with one or several ranks, one after the other.

A life (`Life`) writes, in the folder of all, `<folder>/<name>-<rank>.json`: the
metrics of its steps; `<folder>/state/<name>`: its state after step `CUT`; `<folder>/<name>`: its
weights. The parent computes nothing.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
from pydantic import BaseModel

from buffer.wire.group import RolloutGroup
from consumer.config.critic import CriticConfig
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.critic import Critic
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.model_state.saved_state import SavedState, write_state
from consumer.grpo.policy.policy import Policy
from consumer.handle.ranks import ALONE, Ranks, balanced_shares
from tests.consumer.grpo.models.tiny import make_group, taught

STEPS = 2
CUT = 1
CONFIG: dict[str, Any] = {
    "learning_rate": 1e-3,
    "token_budget": 32,  # several micro-batches, and not as many on each rank
    "updates_per_batch": 2,
    "gradient_checkpointing": True,
    "loss": {"kl_coef": 0.05, "entropy_coef": 0.01},
}


TEACHERS = {"big": 1.0, "small": 0.5}


class Life(BaseModel):
    """Describes one life: `options` of the learner, and the life whose state it continues."""

    name: str
    model: Path
    ranks: int = 1
    steps: int = STEPS
    options: dict[str, Any] = {}
    after: str = ""
    has_critic: bool = False


def groups_of(step: int, rank: int, ranks: int, *teachers: str) -> list[RolloutGroup]:
    """Return a rank's groups of a batch; the first one has the values of teachers."""
    batch = [
        make_group(100 * step + i, prompt=3 + 2 * i, lengths=(3, 9, 1, 4), kept=i % 2 * 20)
        for i in range(4)
    ]
    batch[0] = taught(batch[0], *teachers)
    # by optimizer step, as one rank cuts it: the updates of a batch hold the same groups however
    # many ranks there are
    halves = [batch[:2], batch[2:]]
    own: list[RolloutGroup] = []
    for half in halves:
        share = balanced_shares([int(group.lengths.sum()) for group in half], ranks)[rank]
        own += [half[position] for position in share]
    return own


def make_controller(life: Life, ranks: Ranks) -> TrainController:
    config = LearnerConfig.model_validate(CONFIG | life.options)
    policy = Policy(life.model, config, seed=7, ranks=ranks)
    weights = {"task": TEACHERS}
    if not life.has_critic:
        # sees the scores of all ranks
        return TrainController(policy, "reinforce_pp", teacher_weights=weights)
    critic = Critic(life.model, CriticConfig(learning_rate=1e-2, lam=0.9), policy, seed=7)
    return TrainController(policy, "gae", teacher_weights=weights, critic=critic)


def live(folder: Path, life: Life, ranks: Ranks) -> None:
    controller = make_controller(life, ranks)
    rows = controller.shard_rows()
    if life.after:
        with SavedState(folder / "state" / life.after, rows, ranks.rank) as state:
            controller.load_state_tensors(state)
    metrics = []
    for step in range(CUT + 1 if life.after else 1, life.steps + 1):
        teachers = TEACHERS if life.options.get("distillation") else {}
        metrics.append(controller.fit(groups_of(step, ranks.rank, ranks.size, *teachers)))
        if step == CUT:
            write_state(folder / "state" / life.name, controller.state_tensors(), rows, ranks)
    controller.policy.save_weights(folder / life.name, to_publish=True)
    (folder / f"{life.name}-{ranks.rank}.json").write_bytes(orjson.dumps(metrics))


def in_rank(folder: Path, life: Life, rank: int) -> Callable[[], None]:
    def work() -> None:
        if life.ranks == 1:
            live(folder, life, ALONE)
            return
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{life.name}.store",
            rank=rank,
            world_size=life.ranks,
        )
        live(folder, life, Ranks(dist.group.WORLD))
        dist.barrier()

    return work


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


def main(folder: Path, lives: Sequence[Life]) -> None:
    if any(life.options.get("lora") for life in lives):
        import peft  # noqa: F401  # once, not in each rank
    for life in lives:
        (folder / life.name).mkdir()
        (folder / "state" / life.name).mkdir(parents=True)
        ranks = [fork(in_rank(folder, life, rank)) for rank in range(life.ranks)]
        if any([os.waitpid(rank, 0)[1] for rank in ranks]):
            sys.exit(f"{life.name} failed")
