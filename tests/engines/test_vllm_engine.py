"""What only a real model can show: the numbers are right, before and after an update in place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.rollout import PolicyVersion, SampleParams
from producer_workers.engines import vllm_engine as module
from producer_workers.engines.base import Engine, Generation, GenerationError, WeightsError
from tests.engines.conftest import FIRST, Folders, Run
from tests.engines.test_conformance import LONG, NEXT, PROMPT, generate, interrupt, sampling
from tests.engines.tiny_model import reference_logprobs

pytestmark = pytest.mark.vllm
TOLERANCE = 2e-3


def worst_difference(folder: Path, made: Generation, temperature: float) -> float:
    reference = reference_logprobs(folder, PROMPT.tolist(), made.token_ids.tolist(), temperature)
    return float(np.abs(made.logprobs - np.array(reference)).max())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_transformers_forward_before_and_after_an_update(
    vllm_engine: Engine, run: Run[Any], folders: Folders, temperature: float
) -> None:
    params = sampling(100, seed=11, temperature=temperature)
    before = run(generate(vllm_engine, params))
    run(vllm_engine.load_weights(folders.second, NEXT))
    after = run(generate(vllm_engine, params))
    assert worst_difference(folders.first, before, temperature) < TOLERANCE
    assert worst_difference(folders.second, after, temperature) < TOLERANCE
    assert worst_difference(folders.first, after, temperature) > 1


def test_an_aborted_response_resumed_by_ids_equals_an_uninterrupted_one(vllm_engine: Engine, run: Run[Any]) -> None:
    greedy = sampling(LONG, temperature=0.0)

    async def scenario() -> tuple[Generation, Generation, Generation]:
        whole = await generate(vllm_engine, greedy)
        part = await interrupt(vllm_engine, greedy, lambda: vllm_engine.pause("abort"))
        await vllm_engine.resume()
        prompt = np.concatenate([PROMPT, part.token_ids])
        rest = sampling(LONG - len(part.token_ids), temperature=0.0)
        return whole, part, await vllm_engine.generate("rest", prompt, rest)

    whole, part, rest = run(scenario())
    assert np.array_equal(np.concatenate([part.token_ids, rest.token_ids]), whole.token_ids)


def test_tokens_after_a_swap_come_from_fresh_caches(vllm_engine: Engine, run: Run[Any], folders: Folders) -> None:
    greedy = sampling(LONG, temperature=0.0)

    async def scenario() -> tuple[Generation, Generation]:
        mixed = await interrupt(vllm_engine, greedy, lambda: vllm_engine.load_weights(folders.second, NEXT))
        cut = mixed.spans[1].start
        prompt = np.concatenate([PROMPT, mixed.token_ids[:cut]])
        return mixed, await vllm_engine.generate("fresh", prompt, sampling(LONG - cut, temperature=0.0))

    mixed, fresh = run(scenario())
    cut = mixed.spans[1].start
    assert np.array_equal(mixed.token_ids[cut:], fresh.token_ids)


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


def test_generate_ends_at_a_stop_string_when_one_is_asked_for(
    vllm_engine: Engine, run: Run[Any], folders: Folders
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders.first)
    whole = run(generate(vllm_engine, sampling(40, temperature=0.0)))
    pieces = [tokenizer.decode([token]) for token in whole.token_ids[10:]]
    stop = next(piece for piece in pieces if piece.isascii() and piece.isalnum())
    made = run(generate(vllm_engine, SampleParams(max_tokens=40, temperature=0.0, stops=[stop])))
    assert made.finish_reason == "stop"
    assert stop in tokenizer.decode(made.token_ids)
    assert np.array_equal(made.token_ids, whole.token_ids[: len(made.token_ids)])


def test_generate_refuses_a_prompt_that_is_too_long(vllm_engine: Engine, run: Run[Any]) -> None:
    with pytest.raises(GenerationError, match="too long"):
        run(vllm_engine.generate("too long", np.full(5000, 40, dtype=np.int32), sampling(4)))
    assert len(run(generate(vllm_engine, sampling(4))).token_ids) == 4


def test_a_vllm_without_version_labels_aborts_running_requests_when_weights_change(
    vllm_engine: Engine, run: Run[Any], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    api = vllm_engine._api  # type: ignore[attr-defined]
    monkeypatch.setattr(vllm_engine, "_api", replace(api, tracks_versions=False))

    made = run(interrupt(vllm_engine, sampling(LONG), lambda: vllm_engine.load_weights(folders.second, NEXT)))
    assert made.finish_reason == "abort"
    assert vllm_engine.version() == NEXT
