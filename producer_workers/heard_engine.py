"""An engine as agent loops see it: the worker hears of every answer, since a place in the engine is free then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.rollout import SampleParams
from producer_workers.engines.base import Engine, Generation


class HeardEngine:
    """`engine` in all but this: `answered` is called after every request, however it ends."""

    def __init__(self, engine: Engine, answered: Callable[[], None]) -> None:
        self._engine, self._answered = engine, answered

    async def generate(self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams) -> Generation:
        """See `Engine`."""
        try:
            return await self._engine.generate(request_id, prompt_ids, params)
        finally:
            self._answered()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
