from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from consumer.grpo.models.model_folder import load_model


def test_threads_that_load_at_once_all_get_a_whole_model(model_dir: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(load_model, [model_dir] * 12))
    assert not any(parameter.is_meta for model in models for parameter in model.parameters())
