"""Test vLLM's sleep on a CUDA GPU: its memory is free, and it wakes up as it was.

Part of `make test-modes`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from producer_workers.engines.base import Generation
from producer_workers.engines.vllm.api import is_cpu_build
from rolloutmq.check.machine import count_gpus
from tests.producer_workers.engines.conformance import generate, sampling
from tests.producer_workers.engines.conftest import CPU_ENGINE, Folders, Run, running

CACHE_BYTES = 2 << 30


@pytest.mark.vllm
@pytest.mark.gpu
@pytest.mark.skipif(is_cpu_build() or not count_gpus(), reason="needs vLLM's CUDA build, and a GPU")
def test_an_engine_that_sleeps_gives_its_memory_back_and_wakes_up_as_it_was(
    run: Run[Any], folders: Folders
) -> None:
    import torch

    config = CPU_ENGINE.model_copy(
        update={"enable_sleep_mode": True, "kv_cache_memory_bytes": CACHE_BYTES}
    )

    def free_bytes() -> int:
        return int(torch.cuda.mem_get_info()[0])

    with running(config, run, folders.first) as engine:

        async def scenario() -> tuple[Generation, Generation, int]:
            before = await generate(engine, sampling(50, seed=1))
            await engine.pause("abort")
            awake = free_bytes()
            await engine.sleep()
            freed = free_bytes() - awake
            await engine.wake()
            await engine.resume()
            return before, await generate(engine, sampling(50, seed=1)), freed

        before, after, freed = run(scenario())
    assert freed > 0.9 * CACHE_BYTES
    assert np.array_equal(before.token_ids, after.token_ids)
    assert np.array_equal(before.logprobs, after.logprobs)
