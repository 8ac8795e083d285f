"""The judge alone, and in a whole run in this process, without a model or a GPU."""

import json
from pathlib import Path

from judge import score

from rolloutmq import rehearse

LINES = Path(__file__).with_name("data.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]


def test_the_judge_scores_a_right_and_a_wrong_answer():
    tests = ROWS[0]["answer"]
    right = "```python\ndef double(n):\n    return 2 * n\n```"
    assert score(right, tests, None)["score"] == 1.0
    assert score("I do not know.", tests, None)["score"] < 0


def test_groups_are_made_and_scored():
    groups = rehearse(ROWS[:2], judge=score, samples=4)
    assert [len(group.scores) for group in groups] == [4, 4]
