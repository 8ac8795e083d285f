"""Whatever a worker writes into the keys that it may write, no command sends it to the terminal as
it is.
"""

from __future__ import annotations

import pytest

from tests.rolloutmq.conftest import Command, json_of
from tests.rolloutmq.populate import Scene, forge

TITLE = "\x1b]0;owned\x07\x1b[2J\u202e"
"""Sets the title, clears the screen, writes from right to left."""

LOOKS = (
    ("status",), ("workers",), ("doctor",), ("ls",), ("dead",), ("ls", "--stage", "dead"), ("fsck",),
    ("show", "math-0000000003"), ("batch", "2"), ("logs", "events"),
)  # fmt: skip


@pytest.fixture
def forged(scene: Scene) -> Scene:
    forge(scene, TITLE)
    return scene


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_no_command_lets_a_text_steer_the_terminal(
    forged: Scene, command: Command, words: tuple[str, ...]
) -> None:
    done = command(*words)
    assert done.returncode in (0, 1, 6), done.stderr
    for code in ("\x1b", "\x07", "\u202e"):
        assert code not in done.stdout + done.stderr


@pytest.mark.parametrize("words", [("status", "--json"), ("workers", "--json")], ids=" ".join)
def test_no_program_is_told_less_because_of_a_number_that_is_none(
    forged: Scene, command: Command, words: tuple[str, ...]
) -> None:
    told = json_of(command(*words))
    workers = told["workers"] if isinstance(told, dict) else told
    assert [worker["id"] for worker in workers] == ["w0", "w1"]
    assert {worker["tokens_per_s"] for worker in workers} == {0.0}
