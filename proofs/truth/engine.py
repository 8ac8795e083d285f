"""An engine of random tokens whose requests have the sizes, and the interruptions, of a script.

Nothing in it depends on time: a request that shall be interrupted waits for a pause or for new
weights with a part of its tokens; all others answer at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion, VersionSpan
from buffer.wire.sampling import SampleParams
from producer_workers.engines.base import FinishReason, Generation, PauseMode
from proofs.truth.witness import Witnessed

EOS = 1
FIRST_ID, LAST_ID = 4, 90
"""Ids of tokens that are sampled."""


@dataclass
class Script:
    """What the engines of a run shall do; they share it.

    `least`, `most`: tokens of a request. `interruptions`: how often each member with a number of
    `held` is interrupted, of groups of all tasks but those in `spared`.
    """

    least: int
    most: int
    interruptions: int = 0
    held: frozenset[int] = frozenset()
    spared: frozenset[str] = frozenset()
    seed: int = 0
    _asked: Counter[str] = field(default_factory=Counter)

    def holds(self, request_id: str) -> bool:
        """Whether this request, which begins, shall be interrupted."""
        gid, member = request_id.split("/")[:2]
        if int(member) not in self.held or gid.rpartition("-")[0] in self.spared:
            return False
        self._asked[f"{gid}/{member}"] += 1
        return self._asked[f"{gid}/{member}"] <= self.interruptions

    def draw(self, engine: str, request_id: str) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Tokens and logprobs that no other request has."""
        dice = np.random.default_rng([self.seed, crc32(f"{engine} {request_id}".encode())])
        count = int(dice.integers(self.least, self.most + 1))
        ids = dice.integers(FIRST_ID, LAST_ID, count, dtype="<i4")
        return ids, -dice.random(count, dtype="<f4")


class ScriptedEngine:
    """Engine protocol. `held`: ids of the requests that wait to be interrupted."""

    name = "scripted"
    max_model_len = None

    def __init__(self, label: str, script: Script) -> None:
        self._label = label
        self._script = script
        self._version = FIRST_WEIGHTS
        self._is_paused = False
        self.held: dict[str, asyncio.Future[str]] = {}
        self._frozen: dict[str, asyncio.Future[str]] = {}

    async def start(self) -> None:
        pass

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        ids, logprobs = self._script.draw(self._label, request_id)
        first, part = self._version, 0
        if await self._thawed(request_id) == "abort":
            return _generation(ids[:0], logprobs[:0], [], "abort")
        if self._script.holds(request_id):
            first, part = self._version, len(ids) // 2
            why = await self._waiting(self.held, request_id)
            if "abort" in (why, await self._thawed(request_id)):
                return _generation(ids[:part], logprobs[:part], [(part, first)], "abort")
        made = [(part, first), (len(ids) - part, self._version)]
        return _generation(ids, logprobs, made, "stop")

    async def pause(self, mode: PauseMode) -> None:
        self._is_paused = True
        if mode == "abort":
            _end([*self.held.values(), *self._frozen.values()], "abort")

    async def resume(self) -> None:
        self._is_paused = False
        _end(self._frozen.values(), "resumed")

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        self._version = version
        _end(self.held.values(), "swapped")

    async def sleep(self) -> None:
        pass

    async def wake(self) -> None:
        pass

    def version(self) -> PolicyVersion:
        return self._version

    def check_health(self) -> None:
        pass

    async def shutdown(self) -> None:
        await self.pause("abort")

    async def _thawed(self, request_id: str) -> str:
        """Wait for the end of a pause; "abort" where it ends this request."""
        why = ""
        while self._is_paused and why != "abort":
            why = await self._waiting(self._frozen, request_id)
        return why

    async def _waiting(self, place: dict[str, asyncio.Future[str]], request_id: str) -> str:
        place[request_id] = asyncio.get_running_loop().create_future()
        try:
            return await place[request_id]
        finally:
            del place[request_id]


def _end(waiting: Iterable[asyncio.Future[str]], why: str) -> None:
    for future in list(waiting):
        if not future.done():
            future.set_result(why)


def _generation(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    made: list[tuple[int, PolicyVersion]],
    reason: FinishReason,
) -> Generation:
    spans = []
    start = 0
    for length, weights in made:
        if length:
            spans.append(VersionSpan(start, length, weights.version, weights.lineage))
        start += length
    return Generation(ids, logprobs, tuple(spans), reason)


class WitnessedEngine(Witnessed, ScriptedEngine):
    """Writes down what it makes."""
