from __future__ import annotations

from collections.abc import Iterator

import pytest

from producer_workers.config.engine import TransformersConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine
from tests.producer_workers.engines.conformance import ModelScoreContract, ScoreContract
from tests.producer_workers.engines.conftest import CPU_ENGINE, FIRST, Folders, Run, running

TOP_K = 5


class TestSimulated(ScoreContract):
    @pytest.fixture
    def scorer(self, simulated_engine: Engine) -> Engine:
        return simulated_engine


class TestTransformers(ModelScoreContract):
    @pytest.fixture
    def scorer(self, run: Run[None], folders: Folders) -> Iterator[Engine]:
        engine = build_engine(TransformersConfig().for_scoring(TOP_K), folders.first, FIRST)
        run(engine.start())
        yield engine
        run(engine.shutdown())


@pytest.fixture(scope="module")
def vllm_scorer(run: Run[None], folders: Folders) -> Iterator[Engine]:
    parts = {"max_num_batched_tokens": 512}  # a long text is read in several steps
    config = CPU_ENGINE.model_copy(update={"extra_args": CPU_ENGINE.extra_args | parts})
    with running(config.for_scoring(TOP_K), run, folders.first) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.vllm
class TestVllm(ModelScoreContract):
    @pytest.fixture
    def scorer(self, vllm_scorer: Engine) -> Engine:
        return vllm_scorer
