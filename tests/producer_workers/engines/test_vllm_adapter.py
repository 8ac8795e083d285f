from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine
from tests.producer_workers.engines.adapter_contract import FOLDER, REDIS, AdapterContract
from tests.producer_workers.engines.conftest import CPU_ENGINE, FIRST, Folders, Run

pytestmark = pytest.mark.vllm


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.modes)], ids=["", "tensor-2"]
)
def engine(run: Run[None], folders: Folders, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One that samples with adapters."""
    sizes = {"max_lora_rank": 8, "tensor_parallel_size": request.param}
    engine = build_engine(CPU_ENGINE.model_copy(update=sizes), folders.first, FIRST)
    run(engine.start())
    yield engine
    run(engine.shutdown())


@pytest.fixture(params=[REDIS, FOLDER], ids=["redis", "folder"])
def policy(request: pytest.FixtureRequest) -> dict[str, Any]:
    policy: dict[str, Any] = request.param
    return policy


class TestVllm(AdapterContract):
    """The contract."""
