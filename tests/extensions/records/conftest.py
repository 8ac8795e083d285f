"""A small run that was trained with an archive, by the real trainer and prepared groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.config.config import Config
from rolloutmq.extensions.records.archive import Archive
from tests.consumer.grpo.models.tiny import build_model
from tests.consumer.grpo.training_config import STEPS
from tests.extensions.records.small_run import small_config, train_run


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Config:
    """Return the config of a run with 5 steps, checkpoints 2, 4 and 5, and an archive of all."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    config = small_config(folder, model_dir)
    with EmbeddedServer(folder / "server") as server:
        train_run(server.url, config, model_dir)
    assert Archive(str(folder / "archive")).steps() == list(range(1, STEPS + 1))
    return config
