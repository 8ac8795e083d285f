from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer.wire.group import RolloutGroup
from buffer.wire.group_bytes import decode, encode
from buffer.wire.rollout import PolicyVersion, RolloutState
from buffer.wire.sampling import SampleParams
from producer_workers.config.engine import TransformersConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine, EngineError, Generation
from producer_workers.engines.hf.sampling import sample
from tests.producer_workers.engines.conformance import (
    NEXT,
    PROMPT,
    MaskContract,
    ModelContract,
    RoutedContract,
    check_experts,
    sampling,
)
from tests.producer_workers.engines.conftest import FIRST, Folders, Run
from tests.producer_workers.engines.tiny_model import write_tiny_model


@pytest.fixture
def engine(run: Run[None], folders: Folders) -> Iterator[Engine]:
    engine = build_engine(TransformersConfig(), folders.first, FIRST)
    run(engine.start())
    yield engine
    run(engine.shutdown())


@pytest.mark.slow
class TestTransformers(ModelContract):
    """The contract."""


def test_an_update_frees_the_old_weights_at_once(
    engine: Engine, run: Run[None], folders: Folders
) -> None:
    """Modules of transformers refer to each other: the garbage collector comes much later."""
    model: Any = engine._model  # type: ignore[attr-defined]
    old = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.disable()
    try:
        run(engine.load_weights(folders.second, NEXT))
        assert not any(reference() is not None for reference in old)
    finally:
        gc.enable()


def test_one_thread_loads_at_a_time(
    run: Run[None], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once may get models without values: an update that was cancelled, and the next one."""
    loading: list[int] = []
    most = 0
    load = AutoModelForCausalLM.from_pretrained

    def slow_load(*args: Any, **options: Any) -> Any:
        nonlocal most
        loading.append(1)
        most = max(most, len(loading))
        time.sleep(0.1)
        model = load(*args, **options)
        loading.pop()
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", slow_load)
    engines = [build_engine(TransformersConfig(), folders.first, FIRST) for _ in range(3)]

    async def load_all() -> None:
        await asyncio.gather(*(engine.start() for engine in engines))
        await asyncio.gather(*(engine.shutdown() for engine in engines))

    run(load_all())
    assert most == 1


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyVersion, Path]:
    """Two checkpoints of a mixture of experts of two layers, the first of which has none."""
    root = tmp_path_factory.mktemp("mixtures")
    return {
        version: write_tiny_model(
            root / str(version), seed=seed, architecture="qwen3_moe", dense_layers=[0]
        )
        for version, seed in ((FIRST, 1), (NEXT, 2))
    }


class TestExperts(RoutedContract):
    @pytest.fixture
    def engine(self, run: Run[None], mixtures: dict[PolicyVersion, Path]) -> Iterator[Engine]:
        config = TransformersConfig(routed_experts=True)
        engine = build_engine(config, mixtures[FIRST], FIRST)
        run(engine.start())
        yield engine
        run(engine.shutdown())

    def test_experts_of_a_rollout_that_goes_on_elsewhere_are_of_the_whole(
        self, engine: Engine, run: Run[Any], mixtures: dict[PolicyVersion, Path]
    ) -> None:
        """Its tokens are read again by newer weights, after the wire."""
        state = RolloutState(prompt_ids=PROMPT)

        async def turn(tokens: int) -> None:
            assert state.prompt_ids is not None
            so_far = np.concatenate([state.prompt_ids, state.response_ids])
            made = await engine.generate("one", so_far, sampling(tokens, seed=5))
            state.append(made.token_ids, made.logprobs, made.spans, **made.columns)

        run(turn(12))
        (state,) = decode(encode(RolloutGroup("moe-0000000001", "moe", [state]))).states
        run(engine.load_weights(mixtures[NEXT], NEXT))
        run(turn(6))
        assert isinstance(state.routed_experts, np.ndarray)
        made = Generation(
            state.response_ids,
            state.logprobs,
            tuple(state.spans),
            "length",
            {"routed_experts": state.routed_experts},
        )
        check_experts(made, PROMPT, mixtures)


class TestMasks(MaskContract):
    @pytest.fixture
    def engine(self, run: Run[None], folders: Folders) -> Iterator[Engine]:
        engine = build_engine(TransformersConfig(sampling_mask=True), folders.first, FIRST)
        run(engine.start())
        yield engine
        run(engine.shutdown())


def test_routed_experts_of_a_model_without_any_are_refused(
    run: Run[None], folders: Folders
) -> None:
    with pytest.raises(EngineError, match="no gates that report the chosen experts"):
        run(build_engine(TransformersConfig(routed_experts=True), folders.first, FIRST).start())


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.6},
        {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_logprobs_say(settings: dict[str, Any]) -> None:
    """Over 4,000 draws: each share within five standard deviations, and nothing that was cut off."""
    params = SampleParams(**settings)
    draws = 4000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0])
    generator = torch.Generator().manual_seed(1)
    drawn = [sample(logits, params, [0, 1], [1, 1, 4], (), generator) for _ in range(draws)]
    said = {made.token: np.exp(made.logprob) for made in drawn}
    assert len({made[:2] for made in drawn}) == len(said)
    assert sum(said.values()) == pytest.approx(1.0, abs=1e-4)
    for token, share in said.items():
        found = sum(made.token == token for made in drawn) / draws
        assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / draws) + 1e-9
    for made in drawn:  # exactly what was sampled, in time
        assert (made.kept is None) == (len(said) == len(logits))
        assert made.kept is None or set(made.kept.tolist()) == set(said)
    if "top_k" in settings:
        assert set(said) == {0, 1, 2}
