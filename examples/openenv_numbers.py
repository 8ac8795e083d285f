"""Serve an environment of OpenEnv, a game: guess a number from 1 to 99 in six turns.

pip install 'openenv>=0.10,<0.11'
python examples/openenv_numbers.py 8000

[tasks.numbers]
judge = "environment"
dataset = { kind = "openenv", url = "http://127.0.0.1:8000", size = 1000 }
"""

# mypy: disable-error-code="misc, import-not-found, no-any-unimported"

from __future__ import annotations

import re
import sys
from random import Random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

TURNS = 6


class Guess(Action):
    """What the model said."""

    message: str


class Hint(Observation):
    """What it reads."""

    text: str


class Numbers(Environment):
    """Rewards a guess that is nearer than all before with 0.1, and the right one with 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        """Choose the number by the seed."""
        self._number = Random(seed).randint(1, 99)
        self._nearest = 100
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(text="Guess my number, from 1 to 99. Answer with a number.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        """Answer one guess: the last number in the text."""
        self._state.step_count += 1
        is_last = self._state.step_count == TURNS
        found = re.findall(r"\d+", action.message)
        if not found:
            return Hint(text="That is no number.", reward=0.0, done=is_last)
        away = abs(int(found[-1]) - self._number)
        if not away:
            return Hint(text="Right.", reward=1.0, done=True)
        reward = 0.1 if away < self._nearest else 0.0
        self._nearest = min(away, self._nearest)
        said = "Too high." if int(found[-1]) > self._number else "Too low."
        return Hint(text=said, reward=reward, done=is_last)

    @property
    def state(self) -> State:
        """Return how many guesses were made."""
        return self._state


app = create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
