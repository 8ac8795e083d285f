"""Test vLLM in several processes: each loads its part of new weights, all or none.

One that hangs ends the engine. With a pair of tensor-parallel shards, what each shard takes part
in belongs to `make test-slow`; the rest of the contract, and the other sizes, to `make test-modes`.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from producer_workers.engines import model_folder
from producer_workers.engines.base import Engine, EngineDeadError, Generation, WeightsError
from producer_workers.engines.vllm import engine as module
from producer_workers.engines.vllm.api import is_cpu_build
from rolloutmq.check.machine import count_gpus
from tests.producer_workers.engines.conformance import (
    NEXT,
    TOLERANCE,
    ModelContract,
    generate,
    sampling,
    worst_difference,
)
from tests.producer_workers.engines.conftest import (
    CPU_ENGINE,
    FIRST,
    Folders,
    Run,
    is_vllm,
    running,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SIZES = [
    pytest.param({"tensor_parallel_size": 2}, id="tensor-2"),
    pytest.param({"pipeline_parallel_size": 2}, id="pipeline-2", marks=pytest.mark.modes),
    pytest.param(
        {"data_parallel_size": 2, "max_num_seqs": 16}, id="data-2", marks=pytest.mark.modes
    ),
    pytest.param(
        {"data_parallel_size": 2, "pipeline_parallel_size": 2, "max_num_seqs": 16},
        id="data-2-pipeline-2",
        marks=pytest.mark.modes,
    ),
]


@pytest.fixture(scope="module", params=SIZES)
def sharded(run: Run[None], folders: Folders, request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = CPU_ENGINE.model_copy(update=request.param)
    if not is_cpu_build() and count_gpus() < config.shards:
        pytest.skip(f"needs {config.shards} GPUs")
    with pytest.MonkeyPatch.context() as often:
        often.setattr(module, "HEALTH_CHECK_S", 1.0)
        with running(config, run, folders.first) as engine:
            yield engine


@pytest.fixture
def engine(sharded: Engine, run: Run[None], folders: Folders) -> Iterator[Engine]:
    yield sharded
    run(sharded.resume())
    run(sharded.load_weights(folders.first, FIRST))


@pytest.mark.modes
class TestShards(ModelContract):
    """The contract with short responses.

    Shards that share a core wait for each other in every layer.
    """

    long = 100


class TestWeightsOfShards:
    """Those tests of the contract in which each shard loads weights."""

    long = TestShards.long
    test_logprobs_equal_a_transformers_forward_before_and_after_an_update = (
        ModelContract.test_logprobs_equal_a_transformers_forward_before_and_after_an_update
    )
    test_load_weights_stamps_each_token_when_a_request_runs = (
        ModelContract.test_load_weights_stamps_each_token_when_a_request_runs
    )
    test_load_weights_keeps_the_old_ones_when_the_new_are_bad = (
        ModelContract.test_load_weights_keeps_the_old_ones_when_the_new_are_bad
    )
    test_tokens_after_a_swap_come_from_fresh_caches = (
        ModelContract.test_tokens_after_a_swap_come_from_fresh_caches
    )


@pytest.mark.parametrize("layer", [0, 1])
def test_weights_that_some_shards_refuse_reach_none(
    engine: Engine,
    run: Run[Any],
    folders: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    """Offer weights that only some shards refuse."""
    monkeypatch.setattr(model_folder, "check_same_tensors", lambda *_, **__: None)
    torn = tmp_path / "torn"
    shutil.copytree(folders.second, torn)
    halve(torn, f"model.layers.{layer}.mlp.gate_proj.weight")
    params = sampling(60, seed=5)

    async def scenario() -> tuple[Generation, ...]:
        before = await generate(engine, params)
        running = asyncio.create_task(generate(engine, params))
        await asyncio.sleep(0)
        for folder in (torn, folders.wider, torn):
            with pytest.raises(WeightsError, match=r"shard|failed"):
                await engine.load_weights(folder, NEXT)
        meanwhile = await running
        after = await generate(engine, params)
        assert engine.version() == FIRST
        await engine.load_weights(folders.second, NEXT)
        return before, meanwhile, after, await generate(engine, params)

    before, meanwhile, after, updated = run(scenario())
    assert np.array_equal(before.token_ids, meanwhile.token_ids)
    assert np.array_equal(before.token_ids, after.token_ids)
    assert after.spans[0].version == FIRST.version
    assert worst_difference(folders.second, updated, 1.0) < TOLERANCE


def halve(folder: Path, name: str) -> None:
    """Leave the tensor its first rows."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name][: len(tensors[name]) // 2].copy()
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_shard_that_hangs_is_noticed_and_leaves_nothing_behind(
    sharded: Engine, run: Run[Any]
) -> None:
    """Its shutdown checks that its processes are gone."""
    shard = max(
        (child for child in psutil.Process().children(recursive=True) if holds_weights(child)),
        key=lambda child: int(child.pid),
    )
    control = sharded._control  # type: ignore[attr-defined]
    busy = sharded._lock  # type: ignore[attr-defined]

    async def scenario() -> list[BaseException | Generation]:
        requests = [asyncio.create_task(generate(sharded, sampling(2000))) for _ in range(4)]
        await asyncio.sleep(0.3)
        shard.send_signal(signal.SIGSTOP)
        # What limit_s = 300 does, sooner.
        control.watch(busy, every_s=0.1, limit_s=1.0)
        return await asyncio.gather(*requests, return_exceptions=True)

    outcomes = run(scenario())
    assert {type(outcome) for outcome in outcomes} == {EngineDeadError}
    with pytest.raises(EngineDeadError, match="no answer in 1 s to: rolloutmq_ready"):
        sharded.check_health()


def holds_weights(process: psutil.Process) -> bool:
    return is_vllm(process) and ("Worker" in process.name() or "EngineCore_DP" in process.name())
