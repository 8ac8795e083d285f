"""An engine as the groups of a worker see it: they share it, but a group on its last try has it for
itself.

So it is known who kills an engine. What was in it when it died is suspected, all of it; whoever was
alone did it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.model.rollout import SampleParams
from producer_workers.engines.base import (
    Engine,
    EngineDeadError,
    Generation,
    GenerationError,
    structures,
)


class SharedEngine:
    """`engine` in all but this: `answered` is called after every request, however it ends.

    `alone`: gids that are sampled beside nobody else. `suspects`: gids that were sampled when the
    engine died.
    """

    def __init__(self, engine: Engine, answered: Callable[[], None]) -> None:
        self._engine = engine
        self._answered = answered
        self.alone = set[str]()
        self.suspects = set[str]()
        self._sampled = Counter[str]()
        self._waiting = Counter[str]()
        self._changed = asyncio.Event()

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        """See `Engine`. A structure that nobody keeps to is refused: it would only look like a bad
        model.
        """
        if params.structured and not structures(self._engine):
            hint = "use [engine] kind vllm, or http with a server that has `structured_outputs`"
            raise GenerationError(
                f"the engine {self._engine.name} cannot keep a response to a structure", hint=hint
            )
        gid = request_id.partition("/")[0]
        await self._wait_for_a_place(gid)
        self._sampled[gid] += 1
        try:
            self._engine.check_health()  # one that is dead already is not this group's doing
            return await self._ask(gid, request_id, prompt_ids, params)
        finally:
            self._sampled -= Counter({gid: 1})
            self._changed.set()
            self._answered()

    async def _ask(self, gid: str, *request: Any) -> Generation:
        try:
            return await self._engine.generate(*request)
        except EngineDeadError:
            self.suspects.add(gid)
            raise

    async def _wait_for_a_place(self, gid: str) -> None:
        """Those that want to be alone go first."""
        is_alone = gid in self.alone
        self._waiting += Counter({gid: 1}) if is_alone else Counter()
        try:
            while (
                (self._sampled.keys() - {gid})
                if is_alone
                else (self._waiting or self._sampled.keys() & self.alone)
            ):
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._waiting -= Counter({gid: 1}) if is_alone else Counter()
            self._changed.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
