"""An environment of OpenEnv whose page is gone: at once for even seeds, else in the first step."""

# mypy: disable-error-code="misc, import-not-found, no-any-unimported"

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Environment, Observation, State, create_fastapi_app

from examples.openenv_numbers import Guess, Hint

GONE = {"skip": "the page is gone"}


class Pages(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int = 0, episode_id: str | None = None, **_: Any) -> Observation:
        return Hint(text="Read the page.", metadata={} if seed % 2 else GONE)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Observation:
        return Hint(text="", reward=0.0, metadata=GONE)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Pages, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
