"""Test that the experts which vLLM reports are those of the same tokens in transformers.

Runs where vLLM has Triton: on a CUDA build (`make test-modes`). By hand also on a CPU build, in
Triton's interpreter (`pip install triton`, TRITON_INTERPRET=1, VLLM_USE_V2_MODEL_RUNNER=1, and a
backend named "cpu" in triton.backends).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.wire.rollout import PolicyVersion
from producer_workers.config.engine import VllmConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine, Generation
from producer_workers.engines.vllm.api import is_cpu_build, prepare_environment
from tests.producer_workers.engines.conformance import NEXT, RoutedContract, check_experts, sampling
from tests.producer_workers.engines.conftest import CPU_ENGINE, FIRST, Run
from tests.producer_workers.engines.tiny_model import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
LONG_PROMPT = np.arange(40, 140, dtype=np.int32)
"""Several blocks of the prefix cache."""


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyVersion, Path]:
    root = tmp_path_factory.mktemp("mixtures")
    seeds = {FIRST: 1, NEXT: 2}
    return {
        version: write_tiny_model(root / str(seed), seed=seed, architecture="qwen3_moe")
        for version, seed in seeds.items()
    }


@pytest.fixture(scope="module")
def engine(mixtures: dict[PolicyVersion, Path], run: Run[None]) -> Iterator[Engine]:
    config = (
        CPU_ENGINE
        if is_cpu_build()
        else VllmConfig(
            max_model_len=2048, dtype="float32", enforce_eager=True, prefix_cache="clear"
        )
    )
    prepare_environment(config, on_cpu=is_cpu_build())  # before anything of vLLM is imported
    if find_spec("triton") is None or not import_module("vllm.triton_utils").HAS_TRITON:
        pytest.skip("vLLM's Model Runner V2 needs Triton")
    engine = build_engine(
        config.model_copy(update={"routed_experts": True}), mixtures[FIRST], FIRST
    )
    run(engine.start())
    yield engine
    run(engine.shutdown())


class TestExperts(RoutedContract):
    def test_experts_are_those_of_all_tokens_when_prefixes_are_cached(
        self, engine: Engine, run: Run[Any], mixtures: dict[PolicyVersion, Path]
    ) -> None:
        async def scenario() -> list[Generation]:
            first = await engine.generate("first", LONG_PROMPT, sampling(40, seed=1))
            again = [
                engine.generate(f"again {n}", LONG_PROMPT, sampling(20, seed=n)) for n in range(6)
            ]
            return [first, *await asyncio.gather(*again)]

        for made in run(scenario()):
            check_experts(made, LONG_PROMPT, mixtures)
