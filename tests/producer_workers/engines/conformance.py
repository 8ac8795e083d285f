"""What every engine must do. A new engine is done when a test class that inherits this passes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from buffer.wire.rollout import PolicyVersion, VersionSpan
from buffer.wire.sampling import SampleParams, StructuredOutput
from buffer.wire.sampling_mask import SamplingMask
from producer_workers.engines.base import (
    AbortsGroups,
    Engine,
    EngineLoad,
    Generation,
    GenerationError,
    ReportsLoad,
    Scores,
    WeightsError,
    context_length,
    structures,
)
from producer_workers.worker.inbox import Inbox
from producer_workers.worker.shared_engine import SharedEngine
from tests.producer_workers.engines.conftest import FIRST, Folders, Run
from tests.producer_workers.engines.tiny_model import (
    VOCABULARY,
    allowed_logprobs,
    gates_choose,
    reference_distribution,
    reference_logprobs,
)

PROMPT = np.array([40, 41, 42, 43, 44], dtype=np.int32)
NEXT = PolicyVersion("main", 4)
LONG = 200
"""Tokens of a response that is to be caught in the middle."""
CATCH_S = (0.1, 0.05, 0.2, 0.02, 0.4, 0.8, 1.6, 3.2, 6.4) * 5
"""Seconds to wait before such a response is interrupted, tried in turn."""
TOLERANCE = 2e-3


def sampling(tokens: int, **more: Any) -> SampleParams:
    """Exactly `tokens` tokens: random models meet their stop token by accident."""
    return SampleParams(max_tokens=tokens, min_tokens=tokens, **more)


async def generate(engine: Engine, params: SampleParams) -> Generation:
    return await engine.generate("request", PROMPT, params)


Act = Callable[[], Awaitable[None]]


async def interrupt(
    engine: Any,
    params: SampleParams,
    act: Act,
    undo: Act | None = None,
    ask: Callable[[Any, SampleParams], Coroutine[Any, Any, Generation]] = generate,
) -> Generation:
    """Ask for a response, and call `act` while some but not all of its tokens are made.

    `undo` reverts an `act` that came too early or too late, before the next try.
    """
    for wait_s in CATCH_S:
        task = asyncio.create_task(ask(engine, params))
        await asyncio.sleep(wait_s)
        if is_running := not task.done():
            await act()
        made = await task
        if len(made.spans) > 1 or 0 < len(made.token_ids) < params.max_tokens:
            return made
        if is_running:
            await engine.resume()
            if undo:
                await undo()
    raise AssertionError("the engine was never caught in the middle of a response")


def worst_difference(folder: Path, made: Generation, temperature: float) -> float:
    reference = reference_logprobs(folder, PROMPT.tolist(), made.token_ids.tolist(), temperature)
    return float(np.abs(made.logprobs - np.array(reference)).max())


class EngineContract:
    """For every engine. `engine` is a fixture of the file that tests it."""

    long = LONG

    def test_generate_gives_columns_that_agree(self, engine: Engine, run: Run[Generation]) -> None:
        made = run(generate(engine, sampling(12)))
        assert made.token_ids.dtype == np.int32
        assert made.logprobs.dtype == np.float32
        assert len(made.token_ids) == len(made.logprobs) == 12
        assert np.all(made.logprobs <= 0)
        assert made.spans == (VersionSpan(0, 12, FIRST.version, FIRST.lineage),)
        assert made.finish_reason == "length"

    def test_generate_repeats_itself_when_seeded(
        self, engine: Engine, run: Run[Generation]
    ) -> None:
        once, again = (run(generate(engine, sampling(20, seed=7))) for _ in range(2))
        other = run(generate(engine, sampling(20, seed=8)))
        assert np.array_equal(once.token_ids, again.token_ids)
        assert np.array_equal(once.logprobs, again.logprobs)
        assert not np.array_equal(once.token_ids, other.token_ids)

    def test_generate_ends_at_a_stop_token_when_one_is_asked_for(
        self, engine: Engine, run: Run[Generation]
    ) -> None:
        token_ids = run(generate(engine, sampling(20, seed=7))).token_ids
        stop = int(token_ids[10])
        made = run(
            generate(
                engine, SampleParams(max_tokens=20, min_tokens=5, seed=7, stop_token_ids=[stop])
            )
        )
        assert made.finish_reason == "stop"
        assert made.token_ids[-1] == stop

    def test_pause_abort_returns_a_prefix_when_a_request_runs(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        params = sampling(self.long, seed=3)

        async def scenario() -> tuple[Generation, Generation]:
            whole = await generate(engine, params)
            part = await interrupt(engine, params, lambda: engine.pause("abort"))
            await engine.resume()
            return whole, part

        whole, part = run(scenario())
        made = len(part.token_ids)
        assert part.finish_reason == "abort"
        assert np.array_equal(part.token_ids, whole.token_ids[:made])
        assert len(part.logprobs) == made
        assert part.spans == (VersionSpan(0, made, FIRST.version, FIRST.lineage),)

    def test_abort_of_others_spares_a_group_and_ends_the_rest(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        if not isinstance(engine, AbortsGroups):
            pytest.skip("this engine aborts all or nothing")
        params = sampling(self.long, seed=3)
        spared = "math-0000000001"

        async def scenario() -> tuple[Generation, Generation, Generation]:
            whole = await generate(engine, params)
            kept = asyncio.create_task(engine.generate(f"{spared}/0", PROMPT, params))
            part = await interrupt(engine, params, lambda: engine.abort_others({spared}))
            return whole, await kept, part

        whole, kept, part = run(scenario())
        made = len(part.token_ids)
        assert (part.finish_reason, kept.finish_reason) == ("abort", "length")
        assert np.array_equal(kept.token_ids, whole.token_ids)
        assert np.array_equal(part.token_ids, whole.token_ids[:made])
        assert len(part.logprobs) == made
        assert part.spans == (VersionSpan(0, made, FIRST.version, FIRST.lineage),)

    def test_load_tells_what_is_sampled_and_what_waits_for_a_place(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        """Ask for 40 responses at once: more than any of the engines here has places for."""
        if not isinstance(engine, ReportsLoad):
            pytest.skip("this engine does not say how full it is")

        async def scenario() -> EngineLoad:
            calls = [
                asyncio.create_task(engine.generate(f"r-{n}/0", PROMPT, sampling(1500)))
                for n in range(40)
            ]
            while (load := engine.load()) is None or load.running + load.waiting < len(calls):
                assert not any(call.done() for call in calls), load
                await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            return load

        load = run(scenario())
        assert load.running in (16, 32)
        assert load.waiting == 40 - load.running
        assert 0 <= load.kv_usage <= 1

    def test_pause_keep_loses_no_token_when_a_request_runs(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        params = sampling(self.long, seed=3)

        async def scenario() -> tuple[Generation, Generation, bool]:
            whole = await generate(engine, params)
            task = asyncio.create_task(generate(engine, params))
            await asyncio.sleep(0.1)
            await engine.pause("keep")
            done_before = task.done()
            await asyncio.sleep(0.2)
            frozen = task.done() == done_before
            await engine.resume()
            return whole, await task, frozen

        whole, kept, frozen = run(scenario())
        assert frozen
        assert kept.finish_reason == "length"
        assert np.array_equal(kept.token_ids, whole.token_ids)

    def test_generate_waits_when_the_engine_is_paused(self, engine: Engine, run: Run[Any]) -> None:
        async def scenario() -> tuple[bool, Generation]:
            await engine.pause("abort")
            task = asyncio.create_task(generate(engine, sampling(4)))
            await asyncio.sleep(0.3)
            waited = not task.done()
            await engine.resume()
            return waited, await task

        waited, made = run(scenario())
        assert waited
        assert len(made.token_ids) == 4

    @pytest.mark.parametrize("paused", [True, False], ids=["paused", "unpaused"])
    def test_load_weights_stamps_each_token_when_a_request_runs(
        self, engine: Engine, run: Run[Any], folders: Folders, paused: bool
    ) -> None:
        params = sampling(self.long, seed=3)

        async def swap() -> None:
            if paused:
                await engine.pause("keep")
            await engine.load_weights(folders.second, NEXT)
            if paused:
                await engine.resume()

        async def scenario() -> tuple[Generation, Generation]:
            whole = await generate(engine, params)
            return whole, await interrupt(
                engine, params, swap, lambda: engine.load_weights(folders.first, FIRST)
            )

        whole, mixed = run(scenario())
        assert mixed.finish_reason == "length"
        assert len(mixed.token_ids) == self.long
        old, new = mixed.spans
        assert (old.start, old.version, old.lineage) == (0, *reversed(FIRST))
        assert (new.start, new.start + new.length) == (old.length, self.long)
        assert (new.version, new.lineage) == (NEXT.version, NEXT.lineage)
        assert np.array_equal(mixed.token_ids[: old.length], whole.token_ids[: old.length])
        assert engine.version() == NEXT

    def test_load_weights_leaves_the_engine_paused_when_it_was(
        self, engine: Engine, run: Run[Any], folders: Folders
    ) -> None:
        async def scenario() -> tuple[bool, Generation]:
            await engine.pause("keep")
            await engine.load_weights(folders.second, NEXT)
            task = asyncio.create_task(generate(engine, sampling(4)))
            await asyncio.sleep(0.3)
            waited = not task.done()
            await engine.resume()
            return waited, await task

        waited, made = run(scenario())
        assert waited
        assert made.spans == (VersionSpan(0, 4, NEXT.version, NEXT.lineage),)

    @pytest.mark.parametrize("bad", ["truncated", "absent", "empty"])
    def test_load_weights_keeps_the_old_ones_when_the_new_are_bad(
        self, engine: Engine, run: Run[Any], folders: Folders, tmp_path: Path, bad: str
    ) -> None:
        folder = {"truncated": folders.truncated, "absent": tmp_path / "absent", "empty": tmp_path}[
            bad
        ]
        params = sampling(30, seed=5)
        before = run(generate(engine, params))
        with pytest.raises(WeightsError, match=str(folder)):
            run(engine.load_weights(folder, NEXT))
        after = run(generate(engine, params))
        assert np.array_equal(before.token_ids, after.token_ids)
        assert engine.version() == FIRST
        assert after.spans[0].version == FIRST.version

    def test_cancelling_leaves_nothing_behind_when_requests_run(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        async def scenario() -> list[BaseException | Generation]:
            tasks = [asyncio.create_task(generate(engine, sampling(1500))) for _ in range(20)]
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        outcomes = run(scenario())
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        assert engine.unfinished() == 0  # type: ignore[attr-defined]
        assert len(run(generate(engine, sampling(4))).token_ids) == 4

    def test_many_requests_finish_when_they_come_at_once(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        async def scenario() -> list[Generation]:
            return await asyncio.gather(
                *(engine.generate(f"request {n}", PROMPT, sampling(10)) for n in range(100))
            )

        made = run(scenario())
        assert {len(one.token_ids) for one in made} == {10}
        assert len({one.token_ids.tobytes() for one in made}) > 75


class ModelContract(EngineContract):
    """For every engine with a model."""

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_logprobs_equal_a_transformers_forward_before_and_after_an_update(
        self, engine: Engine, run: Run[Any], folders: Folders, temperature: float
    ) -> None:
        params = sampling(100, seed=11, temperature=temperature)
        before = run(generate(engine, params))
        run(engine.load_weights(folders.second, NEXT))
        after = run(generate(engine, params))
        assert worst_difference(folders.first, before, temperature) < TOLERANCE
        assert worst_difference(folders.second, after, temperature) < TOLERANCE
        assert worst_difference(folders.first, after, temperature) > 1

    def test_an_aborted_response_resumed_by_ids_equals_an_uninterrupted_one(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        greedy = sampling(self.long, temperature=0.0)

        async def scenario() -> tuple[Generation, Generation, Generation]:
            whole = await generate(engine, greedy)
            part = await interrupt(engine, greedy, lambda: engine.pause("abort"))
            await engine.resume()
            prompt = np.concatenate([PROMPT, part.token_ids])
            rest = sampling(self.long - len(part.token_ids), temperature=0.0)
            return whole, part, await engine.generate("rest", prompt, rest)

        whole, part, rest = run(scenario())
        assert np.array_equal(np.concatenate([part.token_ids, rest.token_ids]), whole.token_ids)

    def test_tokens_after_a_swap_come_from_fresh_caches(
        self, engine: Engine, run: Run[Any], folders: Folders
    ) -> None:
        greedy = sampling(self.long, temperature=0.0)

        async def scenario() -> tuple[Generation, Generation]:
            mixed = await interrupt(
                engine,
                greedy,
                lambda: engine.load_weights(folders.second, NEXT),
                lambda: engine.load_weights(folders.first, FIRST),
            )
            cut = mixed.spans[1].start
            prompt = np.concatenate([PROMPT, mixed.token_ids[:cut]])
            return mixed, await engine.generate(
                "fresh", prompt, sampling(self.long - cut, temperature=0.0)
            )

        mixed, fresh = run(scenario())
        cut = mixed.spans[1].start
        assert np.array_equal(mixed.token_ids[cut:], fresh.token_ids)

    def test_generate_ends_at_a_stop_string_when_one_is_asked_for(
        self, engine: Engine, run: Run[Any], folders: Folders
    ) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folders.first)
        whole = run(generate(engine, sampling(40, temperature=0.0)))
        pieces = [tokenizer.decode([token]) for token in whole.token_ids[10:]]
        stop = next(piece for piece in pieces if piece.isascii() and piece.isalnum())
        made = run(generate(engine, SampleParams(max_tokens=40, temperature=0.0, stops=[stop])))
        assert made.finish_reason == "stop"
        assert stop in tokenizer.decode(made.token_ids)
        assert np.array_equal(made.token_ids, whole.token_ids[: len(made.token_ids)])

    def test_generate_refuses_a_prompt_that_is_too_long(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        with pytest.raises(GenerationError, match=r"too long|maximum"):
            run(engine.generate("too long", np.full(5000, 40, dtype=np.int32), sampling(4)))
        assert len(run(generate(engine, sampling(4))).token_ids) == 4

    def test_a_worker_ends_a_response_where_the_context_ends(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        context = context_length(engine)
        assert context is not None
        prompt = np.full(context - 8, 40, dtype=np.int32)

        async def ask(ids: NDArray[np.int32], params: SampleParams) -> Generation:
            inbox = Inbox()
            inbox.open()
            return await SharedEngine(engine, inbox).generate("long/0", ids, params)

        made = run(ask(prompt, SampleParams(max_tokens=100, min_tokens=50, seed=1)))
        assert (made.finish_reason, len(made.token_ids)) == ("length", 8)
        full = run(ask(np.full(context, 40, dtype=np.int32), sampling(4)))
        assert (full.finish_reason, len(full.token_ids)) == ("length", 0)

    def test_seeded_prompts_that_do_not_fit_into_one_step_are_answered(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        """A prefill that is cut in two has ended vLLM's CPU engine, if the request had a seed."""
        prompts = [np.full(1500, 40 + place, dtype=np.int32) for place in range(3)]

        async def scenario() -> list[Generation]:
            calls = (
                engine.generate(f"long {n}", ids, sampling(4, seed=n))
                for n, ids in enumerate(prompts)
            )
            return await asyncio.gather(*calls)

        assert [len(made.token_ids) for made in run(scenario())] == [4, 4, 4]

    def test_a_structure_is_kept_to_with_logprobs_of_what_was_allowed(
        self, engine: Engine, run: Run[Any], folders: Folders
    ) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folders.first)
        params = SampleParams(max_tokens=8, structured=StructuredOutput(choice=["a", "b"]))
        if not structures(engine):
            with pytest.raises(GenerationError, match="cannot produce structured output"):
                run(generate(engine, params))
            return
        allowed = [tokenizer.convert_tokens_to_ids(text) for text in "ab"]
        expected = dict(
            zip(allowed, allowed_logprobs(folders.first, PROMPT.tolist(), allowed), strict=True)
        )
        for seed in range(8):
            made = run(generate(engine, structs.replace(params, seed=seed)))
            token, end = made.token_ids.tolist()
            assert (made.finish_reason, end) == ("stop", tokenizer.eos_token_id)
            assert made.logprobs == pytest.approx([expected[token], 0.0], abs=TOLERANCE)

    def test_a_structure_survives_an_update_and_a_bad_one_is_refused_alone(
        self, engine: Engine, run: Run[Any], folders: Folders
    ) -> None:
        if not structures(engine):
            pytest.skip("this engine keeps to no structure")
        from transformers import AutoTokenizer

        params = SampleParams(max_tokens=500, structured=StructuredOutput(regex="[ab]{200}"))

        async def scenario() -> Generation:
            running = asyncio.create_task(generate(engine, params))
            await asyncio.sleep(0.2)
            await engine.load_weights(folders.second, NEXT)
            with pytest.raises(GenerationError):
                await generate(
                    engine,
                    SampleParams(structured=StructuredOutput(json_schema={"type": "nonsense"})),
                )
            return await running

        made = run(scenario())
        text = AutoTokenizer.from_pretrained(folders.first).decode(
            made.token_ids, skip_special_tokens=True
        )
        assert re.fullmatch("[ab]{200}", text)
        assert sum(span.length for span in made.spans) == len(made.token_ids)


class ScoreContract:
    """For every engine that can score texts; `scorer` is a fixture of the file that tests it."""

    def test_scores_of_a_text_are_the_same_beside_other_requests(
        self, scorer: Any, run: Run[Any]
    ) -> None:
        text = np.arange(40, 140, dtype=np.int32)

        async def scenario() -> tuple[Scores, list[Any]]:
            alone = await scorer.score("alone", text, 60, 3)
            several = (scorer.score(f"text {n}", text, 60, 3) for n in range(4))
            return alone, await asyncio.gather(*several, generate(scorer, sampling(8)))

        alone, (*others, made) = run(scenario())
        assert len(made.token_ids) == 8
        assert alone.logprobs.dtype == alone.top_logprobs.dtype == np.float32
        assert alone.top_ids.dtype == np.int32
        assert alone.logprobs.shape == (40,)
        assert alone.top_ids.shape == alone.top_logprobs.shape == (40, 3)
        assert (np.diff(alone.top_logprobs) <= 0).all()
        for other in others:
            assert np.abs(other.logprobs - alone.logprobs).max() < TOLERANCE
            assert np.abs(other.top_logprobs - alone.top_logprobs).max() < TOLERANCE


class ModelScoreContract(ScoreContract):
    """For engines with a real model, `folders.first`."""

    @pytest.mark.parametrize(("tokens", "start", "top_k"), [(2, 1, 0), (1900, 37, 5)])
    def test_scores_equal_a_transformers_forward(
        self, scorer: Any, run: Run[Scores], folders: Folders, tokens: int, start: int, top_k: int
    ) -> None:
        text = np.random.default_rng(1).integers(4, VOCABULARY, tokens, dtype=np.int32)
        expected = reference_distribution(folders.first, text.tolist())[start - 1 : -1]
        for _ in range(2):  # the second time, a cache might hold the text
            made = run(scorer.score("text", text, start, top_k))
            own = expected[np.arange(tokens - start), text[start:]]
            assert np.abs(made.logprobs - own).max() < TOLERANCE
            best = np.sort(expected)[:, ::-1][:, :top_k]
            assert made.top_ids.shape == best.shape
            assert np.abs(made.top_logprobs - best).max(initial=0) < TOLERANCE
            named = np.take_along_axis(expected, made.top_ids.astype(np.int64), 1)
            assert np.abs(made.top_logprobs - named).max(initial=0) < TOLERANCE

    def test_a_text_that_is_too_long_is_not_scored(self, scorer: Any, run: Run[Any]) -> None:
        limit = context_length(scorer)
        assert limit
        with pytest.raises(GenerationError):
            run(scorer.score("text", np.full(limit + 1, 40, np.int32), 3))
        with pytest.raises(GenerationError):
            run(scorer.score("text", np.array([40, VOCABULARY], np.int32), 1))
        assert run(generate(scorer, sampling(2))).finish_reason == "length"


class RoutedContract:
    """For every engine that records experts, of a mixture of experts with two layers."""

    def test_experts_are_of_the_weights_that_sampled_when_these_change(
        self, engine: Engine, run: Run[Any], mixtures: dict[PolicyVersion, Path]
    ) -> None:
        async def swap() -> None:
            await engine.pause("keep")
            other = NEXT if engine.version() == FIRST else FIRST
            await engine.load_weights(mixtures[other], other)
            await engine.resume()

        made = run(interrupt(engine, sampling(LONG, seed=3), swap))
        assert len(made.spans) == 2
        check_experts(made, PROMPT, mixtures)

    def test_experts_are_those_of_all_tokens_when_a_response_is_cut_off_and_goes_on(
        self, engine: Engine, run: Run[Any], mixtures: dict[PolicyVersion, Path]
    ) -> None:
        async def scenario() -> tuple[Generation, Generation, Any]:
            part = await interrupt(
                engine, sampling(LONG, seed=3), lambda: engine.pause("abort"), engine.resume
            )
            await engine.resume()
            tokens = np.concatenate([PROMPT, part.token_ids])
            return part, await engine.generate("rest", tokens, sampling(10, seed=4)), tokens

        part, rest, tokens = run(scenario())
        check_experts(part, PROMPT, mixtures)
        check_experts(rest, tokens, mixtures)


def check_experts(made: Generation, prompt: Any, mixtures: dict[PolicyVersion, Path]) -> None:
    by = [
        PolicyVersion(span.lineage, span.version) for span in made.spans for _ in range(span.length)
    ]
    by = [by[0]] * (len(prompt) - 1) + by
    assert made.columns["routed_experts"] is not None
    assert made.columns["routed_experts"].shape == (len(by), 2, 2)
    for version, folder in mixtures.items():
        rows = np.array([other == version for other in by])
        assert gates_choose(folder, [*prompt, *made.token_ids], made.columns["routed_experts"])[
            rows
        ].all()


CUT = {"top_p": 0.7, "temperature": 0.8}


class MaskContract:
    """For every engine that records sampling masks; its model is the first of `folders`."""

    def test_masks_are_what_top_p_left_of_the_weights_that_sampled(
        self, engine: Engine, run: Run[Any], folders: Folders
    ) -> None:
        weights = {FIRST: folders.first, NEXT: folders.second}

        async def swap() -> None:
            await engine.pause("keep")
            other = NEXT if engine.version() == FIRST else FIRST
            await engine.load_weights(weights[other], other)
            await engine.resume()

        made = run(interrupt(engine, sampling(LONG, seed=3, **CUT), swap))
        assert len(made.spans) == 2
        check_masks(made, PROMPT, weights)

    def test_masks_are_of_all_tokens_when_a_response_is_cut_off_and_goes_on(
        self, engine: Engine, run: Run[Any], folders: Folders
    ) -> None:
        weights = {engine.version(): folders.first}
        if engine.version() == NEXT:
            weights[NEXT] = folders.second

        async def scenario() -> tuple[Generation, Generation, Any]:
            part = await interrupt(
                engine, sampling(LONG, seed=3, **CUT), lambda: engine.pause("abort"), engine.resume
            )
            await engine.resume()
            tokens = np.concatenate([PROMPT, part.token_ids])
            rest = await engine.generate("rest", tokens, sampling(10, seed=4, **CUT))
            return part, rest, tokens

        part, rest, tokens = run(scenario())
        check_masks(part, PROMPT, weights)
        check_masks(rest, tokens, weights)

    def test_greedy_requests_are_answered(self, engine: Engine, run: Run[Any]) -> None:
        once, again = (run(generate(engine, sampling(8, temperature=0.0))) for _ in range(2))
        assert np.array_equal(once.token_ids, again.token_ids)


def check_masks(made: Generation, prompt: Any, weights: dict[PolicyVersion, Path]) -> None:
    assert isinstance(made.sampling_mask, SamplingMask)
    assert made.sampling_mask.problem(made.token_ids) == ""
    ends = np.cumsum(made.sampling_mask.counts)
    sets = np.split(made.sampling_mask.ids, ends[:-1])
    ids = np.concatenate([prompt, made.token_ids]).tolist()
    for span in made.spans:
        folder = weights[PolicyVersion(span.lineage, span.version)]
        scores = reference_distribution(folder, ids)[len(prompt) - 1 : -1] / CUT["temperature"]
        scores[:, json.loads((folder / "config.json").read_text())["eos_token_id"]] = -np.inf
        chances = np.exp(scores - np.log(np.exp(scores).sum(1, keepdims=True)))
        for n in range(span.start, span.start + span.length):
            kept, least = chances[n, sets[n]], chances[n, sets[n]].min()
            assert kept.sum() >= CUT["top_p"] - TOLERANCE > kept.sum() - least - 2 * TOLERANCE
            assert np.delete(chances[n], sets[n]).max() <= least + TOLERANCE
            own = np.log(chances[n, made.token_ids[n]] / kept.sum())
            assert made.logprobs[n] == pytest.approx(own, abs=TOLERANCE)
