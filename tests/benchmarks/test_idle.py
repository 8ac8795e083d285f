from __future__ import annotations

import pytest

from benchmarks.idle import play
from benchmarks.server import memory_server
from producer_workers.simulation.event_model import simulate
from producer_workers.simulation.setting import Interruption, Lengths, Setting

SMALL = Setting(
    workers=3,
    sequences=4,
    concurrency=2,
    group_size=2,
    batch_size=4,
    token_s=0.005,
    first_token_s=0.005,
    step_s=0.05,
    max_staleness=1,
)


def lengths(draw: int) -> list[int]:
    return [5 + draw % 7 * 5, 20]


def total(lengths: Lengths, draws: int) -> int:
    return sum(sum(lengths(draw)) for draw in range(draws))


@pytest.mark.slow
@pytest.mark.parametrize("interruption", ["keep", "partial", "abort"])
def test_pipeline_trains_the_same_draws_as_the_model(interruption: Interruption) -> None:
    setting = SMALL.model_copy(update={"interruption": interruption})
    with memory_server() as server:
        real = play(server, setting, lengths, 4, "small")
    ideal = simulate(setting, lengths, 4)
    for outcome in (real, ideal):
        assert (outcome.steps, outcome.groups, sum(outcome.staleness.values())) == (4, 16, 16)
        assert max(outcome.staleness) <= 1
        # whatever became too old: 4 steps of 4 groups can be no other draws than the first ones
        # that were started
        assert outcome.trained_tokens <= total(lengths, 24)
        assert outcome.busy_s >= outcome.trained_tokens * setting.token_s * 0.999
    if interruption != "abort":
        assert real.busy_s <= real.capacity_s
