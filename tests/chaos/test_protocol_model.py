"""The protocol of batches, searched to its end: safe as it is, and not without any of its rules."""

from __future__ import annotations

import pytest

from tests.chaos.protocol_model import Rules, Size, search

SAFE = {"durable": Rules(), "told again by the checkpoint": Rules(durable_take=False)}
SIZES = {"batch of 2": Size(groups=4, batch=2), "two losses": Size(crashes=1, losses=2)}
BROKEN = {
    "no record": (Rules(recorded=False), "lost"),
    "commit before the checkpoint": (Rules(commit_after_checkpoint=False), "lost"),
    "no fence": (Rules(fenced=False), "lost"),
    "loss without reassertion": (Rules(durable_take=False, reasserts=False), "stuck"),
    "the next batch on a gap": (
        Rules(durable_take=False, reasserts=False, refuses_gap=False),
        "twice",
    ),
    "two shards that lose apart": (Rules(durable_take=False, one_log=False), "twice"),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("rules", SAFE.values(), ids=SAFE)
def test_the_protocol_has_no_failure(rules: Rules, size: Size) -> None:
    states, problem = search(rules, size)
    assert problem == ""
    assert states > 500


@pytest.mark.parametrize(("rules", "problem"), BROKEN.values(), ids=BROKEN)
def test_without_a_rule_there_is_one(rules: Rules, problem: str) -> None:
    assert search(rules, Size())[1].startswith(problem)
