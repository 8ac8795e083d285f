from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.wire.sampling import SampleParams
from producer_workers.config.distribution import Bimodal, Distribution, Fixed, LogNormal
from producer_workers.config.engine import SimulatedConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import (
    Engine,
    EngineDeadError,
    EngineError,
    Generation,
    GenerationError,
)
from tests.producer_workers.engines.conformance import EngineContract
from tests.producer_workers.engines.conftest import FIRST, Run

PROMPT = np.arange(5, dtype=np.int32)
INSTANT = {"first_token_s": Fixed(value=0), "token_s": Fixed(value=0)}


@pytest.fixture
def engine(simulated_engine: Engine) -> Engine:
    return simulated_engine


class TestSimulated(EngineContract):
    """The contract."""


async def generate_many(config: SimulatedConfig, requests: int, **params: Any) -> list[Any]:
    engine = build_engine(config, Path(), FIRST)
    await engine.start()
    calls = (engine.generate(f"r{n}", PROMPT, SampleParams(**params)) for n in range(requests))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    await engine.shutdown()
    return outcomes


@pytest.mark.parametrize(
    ("distribution", "low", "high"),
    [
        (Fixed(value=50), 50, 50),
        (LogNormal(median=50, sigma=0.5), 45, 55),
        (Bimodal(short=50, long=900, long_share=0.1), 50, 50),
    ],
)
def test_response_lengths_follow_their_distribution(
    run: Run[Any], distribution: Distribution, low: int, high: int
) -> None:
    made = run(generate_many(SimulatedConfig(response_tokens=distribution, **INSTANT), 1000))
    assert low <= np.median([len(one.token_ids) for one in made]) <= high


def test_a_long_response_is_cut_at_max_tokens(run: Run[Any]) -> None:
    lengths = Bimodal(short=5, long=100, long_share=0.5)
    config = SimulatedConfig(response_tokens=lengths, eos_token_id=0, **INSTANT)
    made: list[Generation] = run(generate_many(config, 200, max_tokens=10))
    by_reason = {one.finish_reason: len(one.token_ids) for one in made}
    assert by_reason == {"stop": 5, "length": 10}
    assert all(
        (one.token_ids[-1] == config.eos_token_id) or one.finish_reason == "length" for one in made
    )


def test_every_nth_request_fails_when_asked_to(run: Run[Any]) -> None:
    outcomes = run(generate_many(SimulatedConfig(fail_every=4, **INSTANT), 12))
    assert [isinstance(one, GenerationError) for one in outcomes] == [False, False, False, True] * 3


def test_an_engine_cannot_be_used_when_it_is_shut_down(run: Run[Any]) -> None:
    async def scenario() -> None:
        engine = build_engine(SimulatedConfig(), Path(), FIRST)
        await engine.start()
        await engine.shutdown()
        await engine.shutdown()
        with pytest.raises(EngineDeadError):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            await engine.generate("late", PROMPT, SampleParams())
        with pytest.raises(EngineError):
            await engine.start()

    run(scenario())


def test_shutdown_returns_what_running_requests_have(run: Run[Any]) -> None:
    async def scenario() -> Generation:
        engine = build_engine(SimulatedConfig(token_s=Fixed(value=10)), Path(), FIRST)
        await engine.start()
        task = asyncio.create_task(engine.generate("long", PROMPT, SampleParams()))
        await asyncio.sleep(0.1)
        await engine.shutdown()
        return await task

    assert run(scenario()).finish_reason == "abort"


def test_token_ids_are_those_of_the_model_unless_configured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 16, "eos_token_id": [15, 14]}')

    async def generated(config: SimulatedConfig) -> list[int]:
        engine = build_engine(config, tmp_path, FIRST)
        await engine.start()
        made = await engine.generate("a", np.arange(3, dtype=np.int32), SampleParams(max_tokens=64))
        await engine.shutdown()
        return [int(token) for token in made.token_ids]

    quick: dict[str, Any] = dict.fromkeys(("token_s", "first_token_s"), Fixed(value=0.0))
    quick["response_tokens"] = Fixed(value=64)
    ids = asyncio.run(generated(SimulatedConfig(**quick)))
    assert (max(ids) < 16, ids[-1]) == (True, 14)
    ids = asyncio.run(generated(SimulatedConfig(vocab_size=4000, eos_token_id=3, **quick)))
    assert (max(ids) >= 16, ids[-1]) == (True, 3)


def test_the_engine_dies_after_n_requests_when_asked_to(run: Run[Any]) -> None:
    config = SimulatedConfig(die_after=2)
    outcomes = run(generate_many(config, 3))
    assert [type(one) for one in outcomes] == [EngineDeadError] * 3
