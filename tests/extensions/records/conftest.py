"""A small run that was trained with an archive, by the real trainer and prepared groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from consumer.grpo.trainer import Trainer
from rolloutmq.config.config import Config
from rolloutmq.extensions.records.archive import Archive
from rolloutmq.launch.create import create_run
from rolloutmq.launch.terms import keep_terms, terms_of
from rolloutmq.observers import observed
from tests.consumer.grpo.models.tiny import build_model
from tests.consumer.grpo.training_config import GROUPS, STEPS, training_config
from tests.consumer.handle.crew import at_work


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Config:
    """Return the config of a run with 5 steps, checkpoints 2, 4 and 5, and an archive of all."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    config = training_config(
        "first",
        folder,
        policy={"model": str(model_dir), "max_staleness": 1000},
        learner={"warmup_steps": 2, "decay_steps": 5},
        trainer={"keep_checkpoints": 9},
        retention={"policy": "archive"},
        memory={"compression": "zstd"},
    )
    with EmbeddedServer(folder / "server") as server:
        store = Store(server.url)
        run = create_run(store, config, model_dir)
        with observed(run, "trainer", config), at_work(run, stamp=0, math=5 * GROUPS + 6):
            terms = keep_terms(folder, terms_of(config, model_dir))
            assert Trainer(run, config, model_dir, terms=terms).fit()
        assert run.account.fsck().clean
        store.close()
    assert Archive(str(folder / "archive")).steps() == list(range(1, STEPS + 1))
    return config
