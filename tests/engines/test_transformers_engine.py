"""The transformers engine: the contract, and that its sampler draws from what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from buffer.rollout import SampleParams
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine
from producer_workers.engines.config import TransformersConfig
from producer_workers.engines.token_sampler import sample
from tests.engines.conformance import ModelContract
from tests.engines.conftest import FIRST, Folders, Run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def engine(run: Run[None], folders: Folders) -> Iterator[Engine]:
    engine = build_engine(TransformersConfig(), folders.first, FIRST)
    run(engine.start())
    yield engine
    run(engine.shutdown())


class TestTransformers(ModelContract):
    """The contract."""


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
    params, draws = SampleParams(**settings), 4000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0])
    generator = torch.Generator().manual_seed(1)
    drawn = [sample(logits, params, [0, 1], [1, 1, 4], (), generator) for _ in range(draws)]
    said = {token: np.exp(logprob) for token, logprob in drawn}
    assert len({drawn_ for drawn_ in drawn}) == len(said)
    assert sum(said.values()) == pytest.approx(1.0, abs=1e-4)
    for token, share in said.items():
        found = sum(1 for other, _ in drawn if other == token) / draws
        assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / draws) + 1e-9
    if "top_k" in settings:
        assert set(said) == {0, 1, 2}
