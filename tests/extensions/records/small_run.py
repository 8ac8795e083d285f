"""A small run with an archive: its config, and its training by the real trainer and a crew."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from buffer.errors import Fenced
from buffer.redis.store import Store
from buffer.run.open import wait_for_run
from consumer.grpo.trainer import Trainer
from consumer.grpo.trainer_rank import TrainerRank
from consumer.handle.ranks import ALONE, Ranks
from rolloutmq.config.config import Config
from rolloutmq.launch.create import create_run
from rolloutmq.launch.terms import keep_terms, terms_of
from rolloutmq.observers import observed
from tests.consumer.grpo.training_config import GROUPS, training_config
from tests.consumer.handle.crew import Crew


class Workers(Crew):
    """A crew that goes on when a trainer that recovers a run has ended what it was at."""

    def _turn(self) -> None:
        with suppress(Fenced):
            super()._turn()


def small_config(folder: Path, model_dir: Path, **changes: dict[str, Any]) -> Config:
    """Return the config of a run of 5 steps, with checkpoints 2, 4 and 5."""
    sections: dict[str, dict[str, Any]] = {
        "policy": {"model": str(model_dir), "max_staleness": 1000},
        "learner": {"warmup_steps": 2, "decay_steps": 5},
        "trainer": {"keep_checkpoints": 9},
        "retention": {"policy": "archive"},
        "memory": {"compression": "zstd"},
    }
    for name, keys in changes.items():
        sections[name] = sections.get(name, {}) | keys
    return training_config(folder.name, folder, **sections)


def train_run(
    url: str,
    config: Config,
    model_dir: Path,
    ranks: Ranks = ALONE,
    *,
    pause: tuple[int, Path] | None = None,
) -> None:
    """Train a run on the server at `url` to its end; every rank calls this.

    `pause`: a step behind which there are no groups until a file exists.
    """
    store = Store(url)
    if ranks.rank:
        run = wait_for_run(store, config.run.name)
        TrainerRank(run, config, model_dir, ranks).follow()
        return
    run = create_run(store, config, model_dir)
    enough = (config.plan.steps + 2) * GROUPS
    targets = {"math": pause[0] * GROUPS if pause else enough}
    crew = Workers(run, targets, stamp=0)

    def go_on(file: Path) -> None:
        while not file.exists():
            time.sleep(0.05)
        targets["math"] = enough

    if pause:
        threading.Thread(target=go_on, args=pause[1:], daemon=True).start()
    terms = keep_terms(config.run.folder, terms_of(config, model_dir))
    with observed(run, "trainer", config):
        crew.start()
        try:
            assert Trainer(run, config, model_dir, ranks, terms=terms).fit()
        finally:
            crew.stop()
    assert run.account.fsck().clean
    store.close()
