from __future__ import annotations

from collections.abc import Callable

import pytest

from producer_workers.config.distribution import LogNormal
from producer_workers.simulation.event_model import REDRAWN, simulate
from producer_workers.simulation.setting import Setting, drawn_lengths


def setting(**changes: object) -> Setting:
    """Return one worker, sequence, rollout per group and group per batch; a token takes 1 s."""
    alone = {"workers": 1, "sequences": 1, "concurrency": 1, "group_size": 1, "batch_size": 1}
    return Setting.model_validate(
        alone | {"token_s": 1.0, "first_token_s": 1.0, "step_s": 5.0} | changes
    )


def tens(draw: int) -> list[int]:
    return [10]


def test_model_takes_turns_when_staleness_is_zero() -> None:
    outcome = simulate(setting(), tens, 4)
    assert outcome.seconds == 4 * (10 + 5)
    assert outcome.worker_idle == pytest.approx(1 / 3)
    assert outcome.trainer_idle == pytest.approx(2 / 3)
    assert outcome.staleness == {0: 4}
    assert (outcome.trained_tokens, outcome.wasted_tokens) == (40, 0)


@pytest.mark.parametrize(
    ("changes", "lengths", "steps", "seconds", "staleness", "wasted"),
    [
        # the second group begins at 10 s, when step 1 is still trained; each later one, too
        ({"max_staleness": 1}, tens, 4, 45, {0: 1, 1: 3}, 0),
        # groups end at 10, 23 (3 s of loading from 15 on), 36 and 49
        ({"max_staleness": 1, "sync_s": 3}, tens, 4, 49 + 5, {0: 1, 1: 3}, 0),
        # the update at 15 s throws away 5 tokens: the second group is drawn again, and ends at 25
        ({"max_staleness": 1, "interruption": "abort"}, tens, 2, 25 + 5, {0: 2}, 5),
        ({"max_staleness": 1, "interruption": "partial"}, tens, 2, 20 + 5, {0: 1, 1: 1}, 0),
        # the update at 17 s finds the short rollout of the second group finished, and throws away
        # the 5 tokens of the long one, which ends at 27; the group is as old as its short rollout
        ({"max_staleness": 1, "interruption": "abort", "sequences": 2, "group_size": 2},
         lambda draw: [2, 10] if draw else [10, 12], 2, 27 + 5, {0: 1, 1: 1}, 5),
        # the update at 15 s waits for the second group until 20, loads until 23, and so on
        ({"max_staleness": 1, "interruption": "drain", "sync_s": 3}, tens, 3, 33 + 3 + 5, {0: 1, 1: 2}, 0),
        # the long group is ended when the first batch is taken, since weights 0 may serve no other
        ({"workers": 2, "over_sample_threshold": 1.0, "on_straggler": "drop"},
         lambda draw: [100] if draw == 1 else [10], 2, 2 * (10 + 5), {0: 2}, 10 + 9),
        # two batches are made for one version
        ({"sync_weights_interval": 2}, tens, 4, 2 * (10 + 10 + 5), {0: 2, 1: 2}, 0),
    ],
)  # fmt: skip
def test_seconds_ages_and_waste_are_those_that_a_person_works_out(
    changes: dict[str, object], lengths: Callable[[int], list[int]], steps: int, seconds: int,
    staleness: dict[int, int], wasted: int,
) -> None:  # fmt: skip
    outcome = simulate(setting(**changes), lengths, steps)
    assert (outcome.seconds, outcome.staleness) == (seconds, staleness)
    assert outcome.wasted_tokens == wasted


@pytest.mark.parametrize("interruption", ["keep", "drain", "abort", "partial"])
def test_model_runs_ahead_past_groups_that_take_for_ever(interruption: str) -> None:
    """Batches of 4, and 4 groups that never end: others are started in their stead."""
    fleet = setting(
        workers=8, batch_size=4, max_staleness=1, step_s=10.0, interruption=interruption
    )
    ages = simulate(fleet, lambda draw: [10_000] if draw < 4 else [10], 12).staleness
    assert sum(ages.values()) == 48
    if interruption == "keep":
        # while one batch is trained, the next is made: in lockstep, all would be 0
        assert ages[1] > 20


def test_model_lets_rollouts_wait_in_the_engine_when_a_group_is_larger() -> None:
    outcome = simulate(setting(group_size=2), lambda draw: [10, 10], 1)
    assert outcome.seconds == 10 + 10 + 5
    assert outcome.worker_idle == pytest.approx(5 / 25)


def test_model_waits_for_the_longest_of_a_batch_and_counts_the_idle_places() -> None:
    lengths = [[10], [30]]
    outcome = simulate(setting(workers=2, batch_size=2), lambda draw: lengths[draw % 2], 1)
    assert outcome.seconds == 30 + 5
    assert outcome.busy_s == 40
    assert outcome.held == pytest.approx(40 / 70)


def test_model_is_the_same_each_time_and_loses_no_token_of_long_tails() -> None:
    lengths = drawn_lengths(LogNormal(median=50, sigma=1.0), 4, longest=1000, seed=3)
    fleet = setting(
        workers=4,
        sequences=8,
        concurrency=3,
        group_size=4,
        batch_size=6,
        token_s=0.1,
        max_staleness=2,
    )
    first, second = (simulate(fleet, lengths, 30) for _ in range(2))
    assert first == second
    assert first.groups == sum(first.staleness.values()) == 180
    assert max(first.staleness) <= 2
    assert first.busy_s >= (first.trained_tokens + first.wasted_tokens) * 0.1


@pytest.mark.parametrize("tokens", [1, 2, 77])
def test_setting_turns_seconds_into_the_tokens_they_came_from(tokens: int) -> None:
    fleet = setting(token_s=0.25, first_token_s=1.5)
    assert fleet.tokens(fleet.seconds(tokens)) == tokens
    assert fleet.tokens(fleet.seconds(tokens) - 0.01) == tokens - 1


def test_two_limits_train_long_responses_and_one_limit_does_not() -> None:
    """Every fourth response takes four steps; groups are started for the next step only."""
    fleet = setting(concurrency=4, sequences=4, step_s=10.0, max_ahead=1, max_staleness=1)

    def lengths(draw: int) -> list[int]:
        return [40 if draw % 4 == 0 else 5]

    dropped, waited, late = (
        simulate(fleet.model_copy(update=change), lengths, 60)
        for change in ({"on_straggler": "drop"}, {}, {"max_staleness": 4})
    )
    assert dropped.length_ratio < 0.6
    assert dropped.tail_ratio < 0.3
    assert waited.length_ratio == late.length_ratio == 1.0
    assert waited.wasted_tokens == late.wasted_tokens == 0
    assert late.seconds < waited.seconds
    assert max(late.staleness) <= 4


def test_a_retried_group_draws_its_lengths_again() -> None:
    fleet = setting(concurrency=2, sequences=2, step_s=10.0, max_ahead=1, max_staleness=1)

    def lengths(draw: int) -> list[int]:
        return [60 if draw == 0 else 7 if draw == REDRAWN else 5]

    outcome = simulate(fleet.model_copy(update={"on_straggler": "retry"}), lengths, 10)
    assert outcome.expired_lengths == [60]
    assert 7 in outcome.trained_lengths
