"""Test that the sampling masks of vLLM are what top-p left in transformers.

Runs where vLLM has its Model Runner V2, which needs Triton: on a CUDA build (`make gpu-day`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from buffer.wire.sampling import SampleParams
from producer_workers.config.engine import VllmConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine, GenerationError
from producer_workers.engines.vllm.api import is_cpu_build, prepare_environment
from tests.producer_workers.engines.conformance import MaskContract, generate
from tests.producer_workers.engines.conftest import FIRST, Folders, Run

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]


@pytest.fixture(scope="module")
def engine(run: Run[None], folders: Folders) -> Iterator[Engine]:
    config = VllmConfig(max_model_len=2048, dtype="float32", enforce_eager=True, sampling_mask=True)
    prepare_environment(config, on_cpu=is_cpu_build())  # before anything of vLLM is imported
    has_triton = find_spec("triton") and import_module("vllm.triton_utils").HAS_TRITON
    if not has_triton or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        pytest.skip("vLLM's Model Runner V2 needs Triton")
    engine = build_engine(config, folders.first, FIRST)
    run(engine.start())
    yield engine
    run(engine.shutdown())


class TestMasks(MaskContract):
    def test_a_request_that_nothing_cuts_is_refused(self, engine: Engine, run: Run[Any]) -> None:
        with pytest.raises(GenerationError, match="whole vocabulary"):
            run(generate(engine, SampleParams(max_tokens=4)))
