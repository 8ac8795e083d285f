from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from buffer.errors import ConfigError
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from buffer.wire.sampling import SampleParams, StructuredOutput
from producer_workers.agent_loops.agent_loop import load_agent_loop
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.engines.base import EngineDeadError
from producer_workers.judges.judge import FunctionJudge
from tests.producer_workers.letter_engine import ANSWER, LetterEngine

PROMPT = np.arange(10, 15, dtype="<i4")


def group(k: int = 3, **params: Any) -> list[RolloutState]:
    sample = SampleParams(**params)
    return [
        RolloutState(index=n, prompt_ids=PROMPT, sample_params=sample, ground_truth="42")
        for n in range(k)
    ]


class Bench:
    """A loop, an engine, and the responses that were judged."""

    def __init__(
        self, tokenizer: Any, *, partial: bool = False, judge: Callable[..., Any] | None = None
    ) -> None:
        self.judged: list[str] = []
        self.engine = LetterEngine(tokenizer, PROMPT)
        self.loop = SingleTurnAgentLoop(
            judge=FunctionJudge("bench", judge or self._score),
            tokenizer=tokenizer,
            eos_ids=[tokenizer.eos_token_id],
            partial_rollout=partial,
        )

    def _score(self, *, response: str, ground_truth: str, state: RolloutState) -> float:
        self.judged.append(response)
        return float(ground_truth in response)

    def run(self, states: list[RolloutState], abort_at: int | None = None) -> list[RolloutState]:
        self.engine.abort_at = abort_at
        self.engine.requests.clear()
        return asyncio.run(self.loop.generate_group(states, self.engine, "math-0000000001"))


def test_aborted_rollout_keeps_its_tokens_and_goes_on_when_partial_rollout_is_on(
    tokenizer: Any,
) -> None:
    bench = Bench(tokenizer, partial=True)
    states = bench.run(group(2, max_tokens=40, min_tokens=7), abort_at=4)
    assert {(s.status, s.finish_reason, len(s.response_ids)) for s in states} == {
        (Status.ABORTED, "abort", 4)
    }
    assert bench.judged == []
    bench.engine.now = PolicyVersion("a", 3)
    states = bench.run(states)
    assert [(done, p.max_tokens, p.min_tokens) for _, done, p in bench.engine.requests] == [
        (4, 36, 3)
    ] * 2
    length = len(bench.engine.script)
    for state in states:
        assert state.response_ids.tolist() == bench.engine.script
        assert state.logprobs.tolist() == [-float(n) for n in range(length)]
        assert state.spans == [(0, 4, 0, "a"), (4, length - 4, 3, "a")]
        assert (state.response, state.sample_params.max_tokens) == (ANSWER, 40)
    assert bench.judged == [ANSWER] * 2


def test_resumed_rollout_is_the_same_wherever_it_was_cut(tokenizer: Any) -> None:
    whole = Bench(tokenizer).run(group(1))[0].response_ids.tolist()
    for cut in range(len(whole)):
        bench = Bench(tokenizer, partial=True)
        (state,) = bench.run(bench.run(group(1), abort_at=cut))
        assert state.response_ids.tolist() == whole
        assert (state.status, len(bench.judged)) == (Status.COMPLETED, 1)


@pytest.mark.parametrize(
    "structured", [None, StructuredOutput(regex="a+")], ids=["plain", "structured"]
)
def test_aborted_rollout_is_reset_when_it_cannot_go_on(
    tokenizer: Any, structured: StructuredOutput | None
) -> None:
    """Partial rollout is off, or nobody can go on in the middle of a structure."""
    bench = Bench(tokenizer, partial=structured is not None)
    (state,) = bench.run(group(1, structured=structured), abort_at=4)
    assert (state.status, len(state.response_ids), state.spans) == (Status.ABORTED, 0, [])
    (state,) = bench.run([state])
    assert [done for _, done, _ in bench.engine.requests] == [0]
    assert state.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("status", "partial"), [(Status.EXPIRED, True), (Status.FAILED, True), (Status.ABORTED, False)]
)
def test_rollout_starts_again_when_its_tokens_are_not_to_be_kept(
    tokenizer: Any, status: Status, partial: bool
) -> None:
    bench = Bench(tokenizer, partial=True)
    (state,) = bench.run(group(1), abort_at=4)
    state.status = status
    state.error = "before"
    (state,) = (other := Bench(tokenizer, partial=partial)).run([state])
    assert [done for _, done, _ in other.engine.requests] == [0]
    assert (state.status, state.error, state.response) == (Status.COMPLETED, None, ANSWER)


def test_completed_rollout_is_left_alone_when_its_group_is_resumed(tokenizer: Any) -> None:
    bench = Bench(tokenizer, partial=True)
    done = bench.run(group(1))[0]
    other = group(2)[1]
    before = done.model_dump(exclude={"response_ids", "logprobs", "prompt_ids"})
    states = bench.run([done, other])
    assert states[0] is done
    assert done.model_dump(exclude={"response_ids", "logprobs", "prompt_ids"}) == before
    assert [request.split("/")[1] for request, _, _ in bench.engine.requests] == ["1"]
    assert len(bench.judged) == 2


@pytest.mark.parametrize(
    ("kept", "params", "reason"),
    [(17, {}, "stop"), (6, {"max_tokens": 6}, "length"), (4, {"stop_token_ids": [None]}, "stop")],
)
def test_resumed_rollout_completes_without_a_request_when_nothing_is_left(
    tokenizer: Any, kept: int, params: dict[str, Any], reason: str
) -> None:
    bench = Bench(tokenizer, partial=True)
    script = bench.engine.script
    assert len(script) == 17
    if "stop_token_ids" in params:
        params = {"stop_token_ids": [script[kept - 1]]}
    (state,) = group(1, **params)
    state.append(
        np.array(script[:kept], "<i4"), np.zeros(kept, "<f4"), [VersionSpan(0, kept, 0, "a")]
    )
    state.status = Status.ABORTED
    state.finish_reason = "abort"
    (state,) = bench.run([state])
    assert bench.engine.requests == []
    assert (state.status, state.finish_reason, state.reward is not None) == (
        Status.COMPLETED,
        reason,
        True,
    )
    assert state.response == ANSWER[:kept]


def test_prompt_that_ends_in_eos_is_still_generated(tokenizer: Any) -> None:
    bench = Bench(tokenizer)
    bench.engine.prompt = np.array([10, tokenizer.eos_token_id], "<i4")
    (state,) = group(1)
    state.prompt_ids = bench.engine.prompt
    assert bench.run([state])[0].response == ANSWER


def test_request_ids_are_never_used_twice(tokenizer: Any) -> None:
    bench = Bench(tokenizer, partial=True)
    states, seen = group(), []
    for cut in (2, 5, None):
        states = bench.run(states, abort_at=cut)
        seen += [request for request, _, _ in bench.engine.requests]
    assert len(seen) == len(set(seen)) == 9
    assert all(request.startswith("math-0000000001/") for request in seen)


def test_rollout_without_a_token_fails(tokenizer: Any) -> None:
    bench = Bench(tokenizer)
    bench.engine.script = []
    (state,) = bench.run(group(1))
    assert (state.status, state.error) == (
        Status.FAILED,
        "the engine finished (stop) without a token",
    )


def test_engine_error_is_passed_on_and_the_rest_is_cancelled(tokenizer: Any) -> None:
    error = EngineDeadError("gone")
    bench = Bench(tokenizer)
    bench.engine.broken = {1: error}
    bench.engine.hangs = True
    with pytest.raises(type(error)) as caught:
        bench.run(group())
    assert caught.value is error
    assert bench.engine.cancelled == 2


class Sync:
    def __init__(self, **_: Any) -> None: ...

    def generate_group(self, states: list[RolloutState], engine: Any, gid: str) -> Any: ...


class Plain:
    """A loop that inherits nothing; its `interrupt` is a coroutine function, so no member of a loop."""

    makes_prompts = True

    def __init__(self, **_: Any) -> None:
        self.calls: list[str] = []

    async def generate_group(self, states: list[RolloutState], engine: Any, gid: str) -> Any:
        return states

    async def open(self) -> None:
        self.calls.append("open")

    async def interrupt(self) -> None:
        self.calls.append("interrupt")


def test_a_loop_that_does_not_inherit_has_the_members_that_it_defines() -> None:
    given: dict[str, Any] = {"judge": None, "tokenizer": None, "eos_ids": [2]}
    loop = load_agent_loop(Plain, **given)
    assert loop.makes_prompts
    asyncio.run(loop.open())
    loop.interrupt()
    asyncio.run(loop.close())
    assert loop.generate_group.__self__.calls == ["open"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("multi", "no agent loop 'multi'"),
        (f"{__name__}:PROMPT", "is not a class"),
        (f"{__name__}:Bench", "unexpected keyword argument"),
        (f"{__name__}:Sync", "has no generate_group"),
    ],
)
def test_what_is_no_agent_loop_is_refused(spec: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_agent_loop(spec, judge=None, tokenizer=None, eos_ids=[2])  # type: ignore[arg-type]
