"""What `rolloutmq simulate` chooses and says; the traces it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from buffer.errors import DatasetError
from producer_workers.simulation.advice import Simulated, advise, as_config
from producer_workers.simulation.setting import (
    Outcome,
    Setting,
    candidates,
    picked_lengths,
    read_trace,
)

FLEET = Setting(
    workers=4,
    sequences=8,
    concurrency=2,
    group_size=4,
    batch_size=8,
    token_s=0.02,
    first_token_s=0.1,
    step_s=10,
)


def simulated(
    staleness: int, tokens: int, *, busy: float = 0.9, held: float = 1.0, wasted: int = 0
) -> Simulated:
    outcome = Outcome(100.0, 10, 80, tokens, wasted, busy * 3200, 3200, held, 50.0, {staleness: 80})
    return FLEET.model_copy(update={"max_staleness": staleness}), outcome


def test_advice_takes_the_least_staleness_that_is_near_the_fastest() -> None:
    advice = advise([simulated(0, 500), simulated(1, 980), simulated(2, 1000)])
    assert advice.chosen == 1
    assert "98.0% of the fastest (max_ahead 1, max_staleness 2, keep)" in advice.reasons[0]
    assert "96.0% faster than the best with less staleness" in advice.reasons[2]


def test_advice_takes_the_least_waste_of_equal_staleness() -> None:
    assert advise([simulated(1, 1000, wasted=100), simulated(1, 990, wasted=5)]).chosen == 1


def test_advice_says_how_many_workers_the_trainer_would_use() -> None:
    # 2,880 busy seconds in 10 steps are 288 a step; 8 sequences make 80 in the 10 s of one
    advice = advise([simulated(1, 1000)])
    assert advice.workers_wanted == pytest.approx(3.6)


def test_candidates_leave_out_what_makes_no_difference() -> None:
    settings = candidates(FLEET, [1, 0, 1], ["keep", "abort"], ahead=[1, 4])
    assert [(s.max_ahead, s.max_staleness, s.interruption) for s in settings] == [
        (0, 0, "keep"),
        (1, 1, "keep"),
        (1, 1, "abort"),
    ]


def test_a_fast_setting_that_learns_to_be_short_is_not_advised() -> None:
    setting, outcome = simulated(1, 1000)
    biased = replace(outcome, trained_lengths=[10, 10], expired_lengths=[100])
    assert biased.length_ratio == pytest.approx(10 / 40)
    advice = advise([(setting, biased), simulated(2, 500)])
    assert advice.chosen == 1
    assert any("100.0% faster" in reason and "0.25" in reason for reason in advice.reasons)


def test_config_of_a_partial_setting_aborts_and_keeps_tokens() -> None:
    lines = as_config(FLEET.model_copy(update={"interruption": "partial"})).splitlines()
    assert 'pause_mode = "abort"' in lines
    assert "enable_partial_rollout = true" in lines


def test_trace_takes_tokens_and_seconds_and_draws_only_from_them(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('812\n{"tokens": 20}\n\n{"seconds": 2}\n', encoding="utf-8")
    assert read_trace(file, token_s=0.02) == [812, 20, 100]
    lengths = picked_lengths([812, 20, 100], 8)
    assert set(lengths(0) + lengths(1) + lengths(2)) == {812, 20, 100}
    assert lengths(1) == picked_lengths([812, 20, 100], 8)(1)


@pytest.mark.parametrize(
    "line", ["true", '"812"', '{"tokens": -1}', "{}", "{", '{"tokens": null}', "1e400"]
)
def test_trace_names_the_line_that_is_no_length(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"812\n{line}\n", encoding="utf-8")
    with pytest.raises(DatasetError, match="line 2"):
        read_trace(file, token_s=0.02)
