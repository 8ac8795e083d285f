"""The judge and the game, and in a whole run in this process, without a model or a GPU."""

import json
from pathlib import Path

from game import Game
from judge import score

from rolloutmq import rehearse

LINES = Path(__file__).with_name("data.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]


def test_the_judge_scores_a_right_and_a_wrong_answer():
    truth = ROWS[0]["answer"]
    assert score(f"I guess {truth}", truth, None) == 1.0
    assert score("I do not know.", truth, None) == 0.0


def test_groups_are_made_and_scored():
    options = {"environment": Game(), "max_turns": 2, "keep_turns": True}
    groups = rehearse(
        ROWS[:2], judge=score, agent_loop="multi_turn", agent_loop_options=options, samples=4
    )
    assert [len(group.scores) for group in groups] == [4, 4]
