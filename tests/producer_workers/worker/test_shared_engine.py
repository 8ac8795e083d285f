from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from buffer.wire.rollout import RolloutState, Status, VersionSpan
from buffer.wire.sampling import SampleParams
from buffer.wire.sampling_mask import SamplingMask
from producer_workers.agent_loops.environment import Answer
from producer_workers.agent_loops.multi_turn import MultiTurnAgentLoop
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.engines.base import Generation, GenerationError
from producer_workers.judges.judge import FunctionJudge
from producer_workers.worker.inbox import Inbox
from producer_workers.worker.shared_engine import SharedEngine
from tests.producer_workers.letter_engine import LetterEngine

PROMPT = np.arange(10, 15, dtype="<i4")


class Endless(LetterEngine):
    """Samples as many tokens as it may, and refuses what does not fit its context, as vLLM does.

    `beyond`: tokens that it returns in excess.
    """

    max_model_len: int | None = 40
    structures_output = True
    beyond = 0

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        await asyncio.sleep(0)
        assert self.max_model_len is None or len(prompt_ids) < self.max_model_len
        assert params.min_tokens <= params.max_tokens
        self.requests.append((request_id, len(prompt_ids), params))
        made = params.max_tokens + self.beyond
        if self.max_model_len is not None:
            assert len(prompt_ids) + params.max_tokens <= self.max_model_len
        ids = np.full(made, 7, "<i4")
        spans = (VersionSpan(0, made, 0, "a"),)
        return Generation(ids, np.full(made, -0.5, "<f4"), spans, "length")


class Chatter(Endless):
    """Ends every turn with its stop token after 4 tokens, if it may."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, PROMPT)
        self.eos = tokenizer.eos_token_id

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        made = await super().generate(request_id, prompt_ids, params.within(4))
        if params.max_tokens <= 4:
            return made
        made.token_ids[-1] = self.eos
        return replace(made, finish_reason="stop")


def run(loop: Any, engine: LetterEngine, state: RolloutState) -> RolloutState:
    async def scene() -> RolloutState:
        inbox = Inbox()
        inbox.open()
        shared: Any = SharedEngine(engine, inbox)
        (made,) = await loop.generate_group([state], shared, "math-0000000001")
        return made  # type: ignore[no-any-return]

    return asyncio.run(scene())


def common(tokenizer: Any) -> dict[str, Any]:
    judge = FunctionJudge("j", lambda **_: 1.0)
    eos_ids = [tokenizer.eos_token_id]
    return {"judge": judge, "tokenizer": tokenizer, "eos_ids": eos_ids, "partial_rollout": True}


def rollout(tokens: int, **params: Any) -> RolloutState:
    prompt = np.full(tokens, 3, "<i4")
    return RolloutState(prompt_ids=prompt, sample_params=SampleParams(**params))


def test_a_response_ends_where_the_context_does(chat: Any) -> None:
    engine = Endless(chat, PROMPT)
    loop = SingleTurnAgentLoop(**common(chat))
    state = run(loop, engine, rollout(30, max_tokens=500, min_tokens=100))
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "length")
    assert len(state.response_ids) == 10
    # resumed at the end of its context, it is judged with what it has
    state.status = Status.ABORTED
    state.finish_reason = "abort"
    again = run(loop, engine, state)
    assert (again.status, len(again.response_ids)) == (Status.COMPLETED, 10)
    assert len(engine.requests) == 1


def test_a_prompt_that_fills_the_context_fails_with_its_length(chat: Any) -> None:
    state = run(SingleTurnAgentLoop(**common(chat)), Endless(chat, PROMPT), rollout(40))
    assert state.status is Status.FAILED
    assert "prompt of 40 tokens fills the engine's context" in str(state.error)


@pytest.mark.parametrize("answer", ["a", "a much longer answer, which fits nowhere"])
def test_a_conversation_that_outgrows_the_context_is_truncated_and_judged(
    chat: Any, answer: str
) -> None:
    class Room:
        async def answer(self, state: RolloutState, turn: Any) -> Answer:
            return Answer([{"role": "user", "content": answer}])

    engine = Chatter(chat)
    engine.max_model_len = 100
    loop = MultiTurnAgentLoop(environment=Room(), max_turns=50, **common(chat))
    state = run(loop, engine, rollout(5, max_tokens=1000, seed=7))
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "length")
    assert 5 + len(state.response_ids) <= 100
    assert state.reward == {"score": 1.0}
    seeds = [params.seed for *_, params in engine.requests]
    assert len(set(seeds)) == len(seeds), "two turns had the same seed"


@pytest.mark.parametrize(("beyond", "logprob"), [(45, -0.5), (0, float("nan"))])
def test_tokens_that_nobody_asked_for_or_without_logprobs_are_refused(
    chat: Any, beyond: int, logprob: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Endless(chat, PROMPT)
    engine.max_model_len = None
    engine.beyond = beyond

    async def broken(*request: Any) -> Generation:
        made = await Endless.generate(engine, *request)
        made.logprobs[-1] = logprob
        return made

    monkeypatch.setattr(engine, "generate", broken)
    state = run(SingleTurnAgentLoop(**common(chat)), engine, rollout(5, max_tokens=5))
    assert state.status is Status.FAILED
    assert re.search(r"50 tokens where 5 were allowed|finite logprob", state.error or "")


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"min_tokens": 2}, {"structured": {"choice": ["a"]}}]
)
def test_a_cut_distribution_is_refused_for_tasks_that_train(
    chat: Any, params: dict[str, Any]
) -> None:
    async def ask(gid: str) -> Generation:
        inbox = Inbox()
        inbox.open()
        engine = Endless(chat, PROMPT)
        shared = SharedEngine(engine, inbox, {"math"})
        return await shared.generate(f"{gid}/0", PROMPT, SampleParams(**params))

    with pytest.raises(GenerationError, match=f"{next(iter(params))} gives logprobs of another"):
        asyncio.run(ask("math-0000000001"))
    asyncio.run(ask("math_eval-0000000001"))


def test_a_resumed_response_has_another_seed_and_the_same_one_each_time() -> None:
    params = SampleParams(seed=3, max_tokens=50, min_tokens=20)
    assert params.after(0) == params
    seeds = {params.after(done).seed for done in range(50)}
    assert len(seeds) == 50
    assert params.after(7) == params.after(7)
    assert (params.after(30).max_tokens, params.after(30).min_tokens) == (20, 0)
    assert SampleParams().after(7).seed is None
    assert params.attempt(0) == params
    assert len({params.attempt(number).seed for number in range(50)} | seeds) == 99


class Masked(Endless):
    """Says that each token was one of `kept`."""

    records_masks = True
    kept = (7, 9)

    async def generate(self, *request: Any) -> Generation:
        made = await super().generate(*request)
        counts = np.full(len(made.token_ids), len(self.kept), "<i4")
        ids = np.tile(np.array(self.kept, "<i4"), len(made.token_ids))
        return replace(made, columns={"sampling_mask": SamplingMask(counts, ids)})


def test_a_token_that_its_mask_has_not_fails_the_rollout(chat: Any) -> None:
    engine = Masked(chat, PROMPT)
    loop = SingleTurnAgentLoop(**common(chat))
    assert run(loop, engine, rollout(5, max_tokens=4)).status is Status.COMPLETED
    engine.kept = (8, 9)
    state = run(loop, engine, rollout(5, max_tokens=4))
    assert state.status is Status.FAILED
    assert "token 0, id 7, is not among the 2 tokens" in str(state.error)


@pytest.mark.parametrize(
    ("kind", "params", "refused"),
    [
        (Endless, {"top_p": 0.9}, "top_p"),
        (Endless, {}, None),
        (Masked, {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "min_tokens": 1}, None),
        (Masked, {"top_p": 0.9, "presence_penalty": 1.0}, "presence_penalty"),
    ],
)
def test_a_training_task_is_sampled_as_it_is_trained(
    chat: Any, kind: type[Endless], params: dict[str, Any], refused: str | None
) -> None:
    async def scene() -> Generation:
        inbox = Inbox()
        inbox.open()
        engine: Any = SharedEngine(kind(chat, PROMPT), inbox, ["math"])
        asked = SampleParams(max_tokens=4, **params)
        await engine.generate("other-0000000001/0", PROMPT, asked)  # of a task that is not trained
        made: Generation = await engine.generate("math-0000000001/0", PROMPT, asked)
        return made

    if refused is None:
        assert len(asyncio.run(scene()).token_ids) == 4
        return
    with pytest.raises(GenerationError, match=f"{refused} gives logprobs"):
        asyncio.run(scene())
