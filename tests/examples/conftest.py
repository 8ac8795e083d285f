"""A model for the examples to train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.consumer.grpo.models.tiny import build_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models"))
