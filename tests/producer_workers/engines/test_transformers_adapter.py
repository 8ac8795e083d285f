from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from producer_workers.config.engine import TransformersConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine, Generation, WeightsError
from tests.producer_workers.engines.adapter_contract import FOLDER, VERSIONS, AdapterContract
from tests.producer_workers.engines.conformance import (
    NEXT,
    TOLERANCE,
    generate,
    sampling,
    worst_difference,
)
from tests.producer_workers.engines.conftest import FIRST, Folders, Run


@pytest.fixture
def engine(run: Run[None], folders: Folders) -> Iterator[Engine]:
    engine = build_engine(TransformersConfig(), folders.first, FIRST)
    run(engine.start())
    yield engine
    run(engine.shutdown())


@pytest.fixture
def policy() -> dict[str, Any]:
    return FOLDER


@pytest.mark.slow
class TestTransformers(AdapterContract):
    """It tells adapters from whole weights by their folder."""

    takes_whole_weights = True

    def test_an_adapter_after_whole_weights_is_of_the_first_model(
        self, engine: Engine, run: Run[Any], folders: Folders, adapters: list[Path]
    ) -> None:
        async def scenario() -> tuple[Generation, Generation]:
            await engine.load_weights(adapters[0], VERSIONS[0])
            await engine.load_weights(folders.second, VERSIONS[1])
            whole = await generate(engine, sampling(30, seed=3))
            await engine.load_weights(adapters[1], NEXT)
            return whole, await generate(engine, sampling(30, seed=3))

        whole, adapted = run(scenario())
        assert worst_difference(folders.second, whole, 1.0) < TOLERANCE
        assert worst_difference(adapters[1] / "merged", adapted, 1.0) < TOLERANCE

    def test_an_adapter_with_other_tensors_than_its_config_says_is_refused_at_once(
        self, engine: Engine, run: Run[Any], folders: Folders, adapters: list[Path], tmp_path: Path
    ) -> None:
        """Also as the first one, from which there is no older one to go back to."""
        less = Path(shutil.copytree(adapters[0], tmp_path / "less"))
        config = orjson.loads((less / "adapter_config.json").read_bytes())
        (less / "adapter_config.json").write_bytes(
            orjson.dumps(config | {"target_modules": ["q_proj"]})
        )

        async def scenario() -> list[Generation]:
            made = []
            for whole in adapters:
                with pytest.raises(WeightsError, match="other tensors than its config describes"):
                    await engine.load_weights(less, NEXT)
                made.append(await generate(engine, sampling(30, seed=3)))
                await engine.load_weights(whole, NEXT)
            return made

        made = run(scenario())
        for folder, generation in zip((folders.first, adapters[0] / "merged"), made, strict=True):
            assert worst_difference(folder, generation, 1.0) < TOLERANCE
