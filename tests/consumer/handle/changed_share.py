"""A program: the reference trainer on two ranks; in step 2, a group of rank 1 changes in memory.

Its order: url, run, folder, model. Prints how each rank ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch

from buffer.errors import GroupChanged
from buffer.redis.store import Store
from buffer.run.open import wait_for_run
from buffer.wire.group import RolloutGroup
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.trainer import Trainer
from consumer.grpo.trainer_rank import TrainerRank
from consumer.handle.ranks import join
from rolloutmq.launch.child import rank_environments
from tests.consumer.handle.many_lives import fork, make_config, wait_for_all
from tests.memory_fault import overwrite

RANKS = 2
STEP = 2


def overwrite_in_step() -> None:
    fit = TrainController.fit
    steps = []

    def overwriting(
        controller: TrainController, groups: Sequence[RolloutGroup]
    ) -> dict[str, float]:
        metrics = fit(controller, groups)
        steps.append(metrics)
        if len(steps) == STEP:
            overwrite(groups[0].prompt_ids)
        return metrics

    TrainController.fit = overwriting  # type: ignore[method-assign,assignment]


def train(order: dict[str, Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    folder, model = Path(order["folder"]), Path(order["model"])
    config = make_config(folder, model, "folder")
    config.run.folder.mkdir(exist_ok=True)
    run = wait_for_run(Store(order["url"]), order["run"])
    ranks = join()
    try:
        if ranks.rank:
            overwrite_in_step()
            TrainerRank(run, config, model, ranks).follow()
        else:
            Trainer(run, config, model, ranks).fit()
    except GroupChanged as error:
        os._exit(error.exit_code)


def main(order: dict[str, Any]) -> None:
    environments = rank_environments(RANKS)
    ranks = [fork(partial(train, order, environment)) for environment in environments]
    sys.stdout.write(orjson.dumps(wait_for_all(ranks)).decode())
