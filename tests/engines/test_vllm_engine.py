"""What vLLM inside the worker adds to the conformance suite: wrong weights, cancelled updates, older versions."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from buffer.rollout import PolicyVersion
from producer_workers.engines import vllm_engine as module
from producer_workers.engines.base import Engine, Generation, WeightsError
from tests.engines.conformance import (
    LONG,
    NEXT,
    TOLERANCE,
    ModelContract,
    generate,
    interrupt,
    sampling,
    worst_difference,
)
from tests.engines.conftest import FIRST, Folders, Run

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture
def engine(vllm_engine: Engine) -> Engine:
    return vllm_engine


class TestVllm(ModelContract):
    """The contract."""


@pytest.mark.parametrize("checked", [True, False], ids=["by its header", "by vLLM"])
def test_weights_of_another_shape_are_refused(
    vllm_engine: Engine, run: Run[Any], folders: Folders, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """The second case loads half of the wrong model, so the engine must find its way back."""
    if not checked:
        monkeypatch.setattr(module, "check_same_tensors", lambda *_, **__: None)
    params = sampling(60, seed=5)

    async def scenario() -> tuple[Generation, Generation, Generation]:
        before = await generate(vllm_engine, params)
        running = asyncio.create_task(generate(vllm_engine, params))
        await asyncio.sleep(0)
        with pytest.raises(WeightsError):
            await vllm_engine.load_weights(folders.wider, NEXT)
        return before, await running, await generate(vllm_engine, params)

    before, running, after = run(scenario())
    assert np.array_equal(before.token_ids, running.token_ids)
    assert np.array_equal(before.token_ids, after.token_ids)
    assert vllm_engine.version() == FIRST == PolicyVersion(after.spans[0].lineage, after.spans[0].version)


def test_an_update_is_finished_when_its_caller_is_cancelled(
    vllm_engine: Engine, run: Run[Any], folders: Folders
) -> None:
    async def scenario() -> Generation:
        task = asyncio.create_task(vllm_engine.load_weights(folders.second, NEXT))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await vllm_engine.pause("keep")
        await vllm_engine.resume()
        return await generate(vllm_engine, sampling(50, seed=2))

    made = run(scenario())
    folder = folders.second if vllm_engine.version() == NEXT else folders.first
    assert worst_difference(folder, made, 1.0) < TOLERANCE


def test_a_vllm_without_version_labels_aborts_running_requests_when_weights_change(
    vllm_engine: Engine, run: Run[Any], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    api = vllm_engine._api  # type: ignore[attr-defined]
    monkeypatch.setattr(vllm_engine, "_api", replace(api, tracks_versions=False))

    made = run(interrupt(vllm_engine, sampling(LONG), lambda: vllm_engine.load_weights(folders.second, NEXT)))
    assert made.finish_reason == "abort"
    assert vllm_engine.version() == NEXT
