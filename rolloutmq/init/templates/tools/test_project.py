"""The judge alone, and in a whole run in this process, without a model or a GPU."""

import json
from pathlib import Path

from calculator import calculate
from judge import score

from rolloutmq import rehearse

LINES = Path(__file__).with_name("data.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]


def test_the_judge_scores_a_right_and_a_wrong_answer():
    truth = ROWS[0]["answer"]
    assert score(f"The result is {truth}", truth, None) == 1.0
    assert score("I do not know.", truth, None) == 0.0


def test_groups_are_made_and_scored():
    options = {"tools": [calculate]}
    groups = rehearse(
        ROWS[:2], judge=score, agent_loop="tools", agent_loop_options=options, samples=4
    )
    assert [len(group.scores) for group in groups] == [4, 4]


def test_the_tool():
    assert calculate([1, 2, -4]) == -1
