"""Test vLLM inside the worker: wrong weights and cancelled updates."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import openai
import pytest

from buffer.errors import ConfigError
from buffer.weights.transport import Announcement
from buffer.wire.rollout import PolicyVersion, RolloutState
from buffer.wire.sampling import SampleParams
from consumer.senders.tensor_server import TensorServer
from producer_workers.agent_loops.multi_turn import turns_of
from producer_workers.agent_loops.tokenizer import load_tokenizer
from producer_workers.agent_loops.tool_parsers import tool_parser
from producer_workers.config.engine import VllmConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import (
    Engine,
    EngineError,
    Generation,
    GenerationError,
    ReceivesWeights,
    WeightsError,
)
from producer_workers.engines.model_folder import read_shapes
from producer_workers.engines.vllm import engine as module
from producer_workers.engines.vllm.api import generation_of, is_cpu_build
from producer_workers.gateway.agents import AgentTask
from producer_workers.gateway.loop import GatewayAgentLoop
from tests.producer_workers.engines.conformance import (
    LONG,
    NEXT,
    PROMPT,
    TOLERANCE,
    ModelContract,
    generate,
    interrupt,
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


def test_weights_from_a_trainers_memory_come_while_tokens_flow(
    vllm_engine: Engine,
    run: Run[Any],
    folders: Folders,
    announced: tuple[TensorServer, Announcement],
) -> None:
    """Load weights from memory while requests run."""
    assert isinstance(vllm_engine, ReceivesWeights)
    engine = vllm_engine
    greedy = sampling(LONG, temperature=0.0)
    params = sampling(100, seed=11)

    async def scenario() -> list[Generation]:
        back = partial(engine.load_weights, folders.first, FIRST)
        mixed = await interrupt(
            engine, greedy, lambda: engine.receive_weights(announced[1], NEXT), back
        )
        cut = mixed.spans[1].start
        prompt = np.concatenate([PROMPT, mixed.token_ids[:cut]])
        fresh = await engine.generate("fresh", prompt, sampling(LONG - cut, temperature=0.0))
        received = await generate(engine, params)
        await engine.load_weights(folders.second, NEXT)
        return [mixed, fresh, received, await generate(engine, params)]

    mixed, fresh, received, read = run(scenario())
    assert [PolicyVersion(span.lineage, span.version) for span in mixed.spans] == [FIRST, NEXT]
    assert np.array_equal(mixed.token_ids[mixed.spans[1].start :], fresh.token_ids)
    assert np.array_equal(received.logprobs, read.logprobs)
    assert worst_difference(folders.second, received, 1.0) < TOLERANCE


def test_weights_that_do_not_come_whole_from_a_trainer_never_touch_the_model(
    vllm_engine: Engine,
    run: Run[Any],
    folders: Folders,
    announced: tuple[TensorServer, Announcement],
) -> None:
    assert isinstance(vllm_engine, ReceivesWeights)
    engine, (server, whole), params = vllm_engine, announced, sampling(60, seed=5)
    wider = replace(whole, tensors=read_shapes(folders.wider))
    before = run(generate(engine, params))
    assert server._snapshot
    server._snapshot.weights["model.safetensors"][-1] ^= 1
    unreachable = replace(whole, port=1)
    for refused, why in (
        (whole, "differs from"),
        (wider, "another shape"),
        (unreachable, "cannot connect"),
    ):
        with pytest.raises(WeightsError, match=why):
            run(engine.receive_weights(refused, NEXT))
        assert np.array_equal(run(generate(engine, params)).logprobs, before.logprobs)
    assert vllm_engine.version() == FIRST


def test_the_cpu_build_refuses_to_sleep_at_its_start(run: Run[None], folders: Folders) -> None:
    if not is_cpu_build():
        pytest.skip("this build can sleep")
    engine = build_engine(
        CPU_ENGINE.model_copy(update={"enable_sleep_mode": True}), folders.first, FIRST
    )
    with pytest.raises(EngineError, match="the CPU build of vLLM cannot sleep"):
        run(engine.start())


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


def test_a_session_of_the_gateway_has_the_logprobs_of_the_model(
    vllm_engine: Engine, run: Run[list[RolloutState]], folders: Folders
) -> None:
    """What is recorded equals a plain forward pass of the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer: Any = load_tokenizer(str(folders.first))
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    async def talk(task: AgentTask) -> float:
        messages: list[Any] = list(task.messages)
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            for _ in range(3):
                reply = await client.chat.completions.create(
                    model="policy", messages=messages, max_tokens=12
                )
                messages += [reply.choices[0].message, {"role": "user", "content": "and?"}]
        return 1.0

    loop = GatewayAgentLoop(
        judge=None, tokenizer=tokenizer, eos_ids=[tokenizer.eos_token_id], agent=talk
    )
    states = [
        RolloutState(
            index=n,
            messages=[{"role": "user", "content": f"{n} + 1"}],
            sample_params=SampleParams(seed=n, max_tokens=99),
        )
        for n in range(2)
    ]
    states = run(loop.generate_group(states, vllm_engine, "math-0000000001"))
    model = AutoModelForCausalLM.from_pretrained(folders.first, dtype=torch.float32).eval()
    assert len(states) == 2
    for state in states:
        assert state.prompt_ids is not None
        assert state.response_mask is not None
        ids = np.concatenate([state.prompt_ids, state.response_ids])
        with torch.no_grad():
            said = torch.log_softmax(
                model(torch.tensor(ids[None], dtype=torch.long)).logits[0], -1
            ).numpy()
        trained = np.flatnonzero(state.response_mask)
        places = trained + len(state.prompt_ids)
        assert len(turns_of(state)) == 3
        assert np.abs(said[places - 1, ids[places]] - state.logprobs[trained]).max() < TOLERANCE
        assert not state.logprobs[state.response_mask == 0].any()


def test_routed_experts_are_refused_where_vllm_has_no_triton(
    run: Run[None], folders: Folders
) -> None:
    if import_module("vllm.triton_utils").HAS_TRITON:
        pytest.skip("this vLLM has Triton: test_vllm_experts.py asks it")
    with pytest.raises(EngineError, match="Triton") as caught:
        run(build_engine(VllmConfig(routed_experts=True), folders.first, FIRST).start())
    assert "kind transformers" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "reason"), [("repetition", "length"), ("error", None), (None, None), ("new", None)]
)
def test_every_reason_of_vllm_has_a_meaning_or_fails_its_request(
    given: str | None, reason: str | None
) -> None:
    outputs = import_module("vllm.outputs")
    flat = import_module("vllm.logprobs").FlatLogprobs
    output = outputs.CompletionOutput(
        0, "", [5, 6], None, flat(logprobs=[-1.0, -2.0]), finish_reason=given
    )
    if reason is None:
        with pytest.raises(GenerationError, match=f"with the reason {given!r}"):
            generation_of(output, 3)
    else:
        assert generation_of(output, 3).finish_reason == reason


@pytest.mark.parametrize(
    ("rows", "kind"), [(4, "uint8"), (4, "uint16"), (3, "uint8"), (None, "uint8")], ids=str
)
def test_routed_experts_of_vllm_become_a_column_or_an_error(rows: int | None, kind: str) -> None:
    """Of vLLM's own class: 3 tokens of prompt and 2 after them are 4 that were routed."""
    outputs = import_module("vllm.outputs")
    flat = import_module("vllm.logprobs").FlatLogprobs
    given = None if rows is None else np.full((rows, 2, 8), 255, kind)
    output = outputs.CompletionOutput(
        0, "", [5, 6], None, flat(logprobs=[-1.0, -2.0]), finish_reason="stop", routed_experts=given
    )
    if rows == 3:
        with pytest.raises(GenerationError, match="of 3 tokens"):
            generation_of(output, 3)
        return
    experts = generation_of(output, 3).routed_experts
    assert (experts is None) == (rows is None)
    if experts is not None:
        assert (experts.shape, experts.dtype.str) == ((4, 2, 8), "<i2")
        assert experts.max() == 255


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
