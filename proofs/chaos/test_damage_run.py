"""A key of a live run is damaged under real processes; `make chaos-damage` tries all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.redis.key_table import TABLE
from proofs.chaos.damage_run import all_trials, run_trials
from proofs.chaos.damaged_keys import TARGETS
from proofs.chaos.harness import Plan

pytestmark = pytest.mark.timeout(300)


def test_every_kind_of_key_has_a_trial() -> None:
    assert {target.row for target in TARGETS} == set(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["control deleted", "ledger:<name> deleted"])
def test_a_run_that_loses_a_key_is_made_again_while_its_workers_work(
    words: str, tmp_path: Path
) -> None:
    trials = all_trials(words)[:1]
    assert run_trials(Plan(seed=1, seconds=0.0, faults=0), tmp_path, print, trials) == []
    assert trials[0].ended
    assert trials[0].made_again
