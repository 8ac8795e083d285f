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
from tests.producer_workers.engines.conformance import LONG, NEXT, PROMPT, interrupt, sampling
from tests.producer_workers.engines.conftest import CPU_ENGINE, FIRST, Run
from tests.producer_workers.engines.tiny_model import gates_choose, write_tiny_model

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


def check(made: Generation, prompt: Any, mixtures: dict[PolicyVersion, Path]) -> None:
    """Each row is of the weights that sampled the token behind it."""
    by = [
        PolicyVersion(span.lineage, span.version) for span in made.spans for _ in range(span.length)
    ]
    by = [by[0]] * (len(prompt) - 1) + by
    assert made.routed_experts is not None
    assert made.routed_experts.shape == (len(by), 2, 2)
    for version, folder in mixtures.items():
        rows = np.array([other == version for other in by])
        assert gates_choose(folder, [*prompt, *made.token_ids], made.routed_experts)[rows].all()


def test_experts_are_those_of_all_tokens_when_prefixes_are_cached(
    engine: Engine, run: Run[Any], mixtures: dict[PolicyVersion, Path]
) -> None:
    async def scenario() -> list[Generation]:
        first = await engine.generate("first", LONG_PROMPT, sampling(40, seed=1))
        again = [engine.generate(f"again {n}", LONG_PROMPT, sampling(20, seed=n)) for n in range(6)]
        return [first, *await asyncio.gather(*again)]

    for made in run(scenario()):
        check(made, LONG_PROMPT, mixtures)


def test_experts_are_those_of_all_tokens_when_a_response_is_cut_off_and_goes_on(
    engine: Engine, run: Run[Any], mixtures: dict[PolicyVersion, Path]
) -> None:
    async def scenario() -> tuple[Generation, Generation, Any]:
        part = await interrupt(engine, sampling(LONG, seed=3), lambda: engine.pause("abort"))
        await engine.resume()
        tokens = np.concatenate([PROMPT, part.token_ids])
        return part, await engine.generate("rest", tokens, sampling(10, seed=4)), tokens

    part, rest, tokens = run(scenario())
    check(part, PROMPT, mixtures)
    check(rest, tokens, mixtures)


def test_experts_are_of_the_weights_that_sampled_when_these_change(
    engine: Engine, run: Run[Any], mixtures: dict[PolicyVersion, Path]
) -> None:
    async def swap() -> None:
        other = NEXT if engine.version() == FIRST else FIRST
        await engine.load_weights(mixtures[other], other)

    made = run(interrupt(engine, sampling(LONG, seed=5), swap))
    assert len(made.spans) == 2
    check(made, PROMPT, mixtures)
