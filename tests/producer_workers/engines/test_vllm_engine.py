from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from buffer.errors import ConfigError
from buffer.wire.rollout import PolicyVersion
from buffer.wire.sampling import SampleParams
from buffer.wire.sampling_mask import SamplingMask
from producer_workers.agent_loops.tool_parsers import tool_parser
from producer_workers.engines import build_engine, model_folder
from producer_workers.engines.base import (
    Engine,
    EngineError,
    Generation,
    GenerationError,
    WeightsError,
)
from producer_workers.engines.vllm.api import (
    generation_of,
    is_cpu_build,
    masked,
    sampling_arguments,
)
from tests.producer_workers.engines.conformance import (
    NEXT,
    TOLERANCE,
    ModelContract,
    generate,
    sampling,
    worst_difference,
)
from tests.producer_workers.engines.conftest import CPU_ENGINE, FIRST, Folders, Run

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(vllm_engine: Engine) -> Engine:
    return vllm_engine


class TestVllm(ModelContract):
    """The contract."""


@pytest.mark.parametrize("checked", [True, False], ids=["by its header", "by vLLM"])
def test_weights_of_another_shape_are_refused(
    vllm_engine: Engine,
    run: Run[Any],
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    checked: bool,
) -> None:
    """The second case loads half of the wrong model, so the engine must find its way back."""
    if not checked:
        monkeypatch.setattr(model_folder, "check_same_tensors", lambda *_, **__: None)
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
    assert (
        vllm_engine.version()
        == FIRST
        == PolicyVersion(after.spans[0].lineage, after.spans[0].version)
    )


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


def test_waking_up_leaves_a_paused_engine_paused(
    vllm_engine: Engine, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself samples again once it is awake. On a CPU its sleep is a pause that frees nothing."""
    engine: Any = vllm_engine
    monkeypatch.setattr(
        engine, "_config", engine._config.model_copy(update={"enable_sleep_mode": True})
    )

    async def scenario() -> tuple[list[bool], Generation]:
        paused = []
        await engine.pause("keep")
        await engine.sleep()
        running = asyncio.create_task(generate(engine, sampling(20)))
        for call in (engine.wake, engine.resume, engine.sleep, engine.wake):
            await call()
            paused.append(await engine._llm.is_paused())
        return paused, await running

    paused, made = run(scenario())
    assert paused == [True, False, True, False]
    # sleep ends requests, as it drops their cache; this one may be through by then
    assert made.finish_reason == "abort" or len(made.token_ids) == 20


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ("enable_sleep_mode", "the CPU build of vLLM cannot sleep"),
        ("routed_experts", "Triton"),
        ("sampling_mask", "cannot record sampling_mask: Triton"),
    ],
)
def test_a_cpu_build_refuses_at_its_start_what_it_cannot_do(
    run: Run[None], folders: Folders, asked: str, what: str
) -> None:
    if not is_cpu_build() or import_module("vllm.triton_utils").HAS_TRITON:
        pytest.skip("this build can do it")
    engine = build_engine(CPU_ENGINE.model_copy(update={asked: True}), folders.first, FIRST)
    with pytest.raises(EngineError, match=what):
        run(engine.start())


def completion(reason: str | None, experts: Any = None, masks: Any = None) -> Any:
    """Return two tokens, as vLLM's own class has them."""
    logprobs = import_module("vllm.logprobs").FlatLogprobs(logprobs=[-1.0, -2.0])
    outputs = import_module("vllm.outputs")
    mask = masks and outputs.SamplingMask(masks)
    return outputs.CompletionOutput(
        *(0, "", [5, 6], None, logprobs),
        finish_reason=reason,
        routed_experts=experts,
        sampling_mask=mask,
    )


@pytest.mark.parametrize(
    ("given", "reason"), [("repetition", "length"), ("error", None), (None, None), ("new", None)]
)
def test_every_reason_of_vllm_has_a_meaning_or_fails_its_request(
    given: str | None, reason: str | None
) -> None:
    if reason:
        assert generation_of(completion(given), 3).finish_reason == reason
        return
    with pytest.raises(GenerationError, match=f"with the reason {given!r}"):
        generation_of(completion(given), 3)


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_routed_experts_of_vllm_become_a_column_or_an_error(kind: str) -> None:
    """3 tokens of prompt and 2 after them are 4 that were routed."""
    experts = generation_of(completion("stop", np.full((4, 2, 8), 255, kind)), 3).columns[
        "routed_experts"
    ]
    assert experts is not None
    assert (experts.shape, experts.dtype.str, experts.max()) == ((4, 2, 8), "<i2", 255)
    assert generation_of(completion("stop"), 3).columns["routed_experts"] is None
    with pytest.raises(GenerationError, match="of 3 tokens"):
        generation_of(completion("stop", np.zeros((3, 2, 8), kind)), 3)


def test_sampling_masks_of_vllm_become_columns() -> None:
    mask = generation_of(completion("stop", masks=[[5, 7, 9], [6]]), 3).sampling_mask
    assert isinstance(mask, SamplingMask)
    assert (mask.counts.tolist(), mask.ids.tolist()) == ([3, 1], [5, 7, 9, 6])
    assert mask.counts.dtype.str == mask.ids.dtype.str == "<i4"
    assert generation_of(completion("stop"), 3).sampling_mask is None


@pytest.mark.parametrize(
    ("asked", "top_k"),
    [
        (SampleParams(top_p=0.9), 2**31 - 1),
        (SampleParams(min_p=0.1, top_k=7), 7),
        (SampleParams(temperature=0.0), 1),
    ],
)
def test_requests_to_an_engine_that_records_masks_are_what_vllm_accepts(
    asked: SampleParams, top_k: int
) -> None:
    """vLLM's own class takes the parameters; its rules: temperature > 0, top_k > 0."""
    made = import_module("vllm").SamplingParams(**sampling_arguments(masked(asked)))
    assert made.temperature > 0
    assert made.top_k == top_k
    assert (made.top_p, made.min_p) == (asked.top_p, asked.min_p)


def test_a_request_that_would_record_the_whole_vocabulary_is_refused() -> None:
    with pytest.raises(GenerationError, match="whole vocabulary"):
        masked(SampleParams())


def test_a_parser_of_vllm_serves_turns_by_its_name(chat: Any) -> None:
    """It is here since this process has imported vLLM, which takes seconds."""
    parser = tool_parser("pythonic", chat)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    content, calls = parser.parse("<think>[rm()]</think>[add(a=2, b=3)]", tools)
    assert content == "<think>[rm()]</think>"
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 2, "b": 3})]
    assert parser.parse("no call", tools) == ("no call", [])
    with pytest.raises(ConfigError, match="no tool parser 'klingon'") as caught:
        tool_parser("klingon", chat)
    assert "qwen3_coder" in caught.value.hint
    assert "hermes" in caught.value.hint
    with pytest.raises(ConfigError, match=r"'deepseek_v3' cannot be used: .*token"):
        tool_parser("deepseek_v3", chat)
