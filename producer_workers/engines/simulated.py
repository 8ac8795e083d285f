"""Simulate an engine with random tokens on a clock, for load tests and capacity planning.

A response depends only on (engine seed, prompt ids, request seed or id), and its progress on the
engine's clock, which stops while paused.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from buffer.wire.rollout import PolicyVersion, VersionSpan
from buffer.wire.sampling import SampleParams
from producer_workers.config.engine import SimulatedConfig
from producer_workers.engines.base import (
    TALLY,
    EngineDeadError,
    EngineError,
    EngineLoad,
    FinishReason,
    Generation,
    GenerationError,
    GroupImages,
    PauseMode,
    Scores,
    Tally,
    WeightsError,
)
from producer_workers.engines.model_folder import eos_ids, read_shapes, vocabulary_size

logger = logging.getLogger(__name__)

VOCABULARY = 32_000  # number of token ids without a model


@dataclass(slots=True, eq=False)
class _Run:
    """One request, with the whole response that it will have made when its time is over."""

    request_id: str
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    first_token_s: float
    token_s: float
    result: asyncio.Future[Generation]
    started_s: float | None = None
    timer: asyncio.TimerHandle | None = None

    def tokens_at(self, clock_s: float) -> int:
        if self.started_s is None or clock_s < self.started_s + self.first_token_s:
            return 0
        if self.token_s == 0:
            return len(self.token_ids)
        made = int((clock_s - self.started_s - self.first_token_s) / self.token_s) + 1
        return min(made, len(self.token_ids))


class SimulatedEngine:
    """An engine without a model. It accepts and ignores stop strings and structures."""

    name = "simulated"
    structures_output = True
    images = GroupImages()

    def __init__(self, config: SimulatedConfig, version: PolicyVersion) -> None:
        self._config = config
        self.max_model_len = config.max_model_len
        self._swaps: list[tuple[float, PolicyVersion]] = [(-inf, version)]
        self._running: set[_Run] = set()
        self._waiting: deque[_Run] = deque()
        self._requests = 0
        self._frozen_s: float | None = 0.0  # the clock, while it stands still
        self._offset_s = 0.0  # loop time minus clock, while it runs
        self._paused = False
        self.asleep = False
        self._control = asyncio.Lock()  # a resume during a load must not start the clock
        self._state = "new"

    async def start(self) -> None:
        if self._state != "new":
            raise EngineError(f"the simulated engine is {self._state}", hint="build a new one")
        logger.warning("simulated engine: random tokens, no model; never train on this")
        self._state = "up"
        self._thaw()

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        self._count(request_id)
        run = self._draw(request_id, prompt_ids, params)
        self._waiting.append(run)
        self._start_waiting()
        try:
            return await run.result
        finally:  # also if it was aborted, or its caller was cancelled
            if not run.result.done() or run.result.cancelled():
                TALLY.get(Tally()).tokens = run.tokens_at(self._clock())
            if run.timer:
                run.timer.cancel()
            self._running.discard(run)
            if run.started_s is None and run in self._waiting:
                self._waiting.remove(run)
            self._start_waiting()

    async def score(
        self, request_id: str, ids: NDArray[np.int32], start: int, top_k: int = 0
    ) -> Scores:
        """Return scores that depend only on the seed and on `ids`, after a first token's time."""
        self._count(request_id)
        rng = self._random("scores", ids)
        await asyncio.sleep(self._config.first_token_s.draw(rng))
        self.check_health()
        tokens = len(ids) - start
        top_ids = rng.integers(0, self._config.vocab_size or VOCABULARY, (tokens, top_k))
        top_logprobs = -np.sort(rng.exponential(2.0, (tokens, top_k)))
        return Scores(
            -rng.exponential(0.5, tokens).astype(np.float32),
            top_ids.astype(np.int32),
            top_logprobs.astype(np.float32),
        )

    async def pause(self, mode: PauseMode) -> None:
        self.check_health()
        async with self._control:
            self._paused = True
            self._freeze()
            if mode == "abort":
                self._abort(self._all())

    async def abort_others(self, spared: Collection[str]) -> None:
        self.check_health()
        self._abort([run for run in self._all() if run.request_id.partition("/")[0] not in spared])

    async def resume(self) -> None:
        self.check_health()
        async with self._control:
            self._paused = False
            self._thaw()

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        self.check_health()
        if not path.is_dir():
            raise WeightsError(f"no weights folder at {path}")
        await asyncio.to_thread(read_shapes, path)
        async with self._control:
            self._freeze()
            try:
                await asyncio.sleep(self._config.load_weights_s)
                self._swaps.append((self._clock(), version))
            finally:
                if not self._paused:
                    self._thaw()

    async def sleep(self) -> None:
        self.check_health()
        if self.unfinished():
            raise EngineError(f"cannot sleep while {self.unfinished()} requests run")
        self.asleep = True

    async def wake(self) -> None:
        self.check_health()
        self.asleep = False

    def version(self) -> PolicyVersion:
        return self._swaps[-1][1]

    def check_health(self) -> None:
        if self._state != "up":
            raise self._death()

    def unfinished(self) -> int:
        return len(self._running) + len(self._waiting)

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._running), len(self._waiting), 0.0)

    async def shutdown(self) -> None:
        if self._state == "up":
            self._freeze()  # no timer may fire after the end
            self._abort(self._all())
        self._state = "shut down"

    def _clock(self) -> float:
        if self._frozen_s is not None:
            return self._frozen_s
        return asyncio.get_running_loop().time() - self._offset_s

    def _freeze(self) -> None:
        self._frozen_s = self._clock()
        for run in self._running:
            if run.timer:
                run.timer.cancel()

    def _thaw(self) -> None:
        if self._frozen_s is None:
            return
        self._offset_s = asyncio.get_running_loop().time() - self._frozen_s
        self._frozen_s = None
        for run in self._running:
            self._set_timer(run)
        self._start_waiting()

    def _start_waiting(self) -> None:
        if self._frozen_s is not None:
            return
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            run = self._waiting.popleft()
            run.started_s = self._clock()
            self._running.add(run)
            self._set_timer(run)

    def _set_timer(self, run: _Run) -> None:
        assert run.started_s is not None
        tokens = len(run.token_ids)
        due_s = run.started_s + run.first_token_s + run.token_s * (tokens - 1)
        run.timer = asyncio.get_running_loop().call_at(
            self._offset_s + due_s, self._end, run, tokens, run.finish_reason
        )

    def _end(self, run: _Run, tokens: int, reason: FinishReason) -> None:
        """End a request with its first `tokens`; spans end where weights changed between them."""
        if run.result.done():
            return
        spans: list[VersionSpan] = []
        end = tokens
        for clock_s, version in reversed(self._swaps):
            start = min(run.tokens_at(clock_s), end)
            if start < end:
                spans.insert(0, VersionSpan(start, end - start, version.version, version.lineage))
            end = start
        run.result.set_result(
            Generation(run.token_ids[:tokens], run.logprobs[:tokens], tuple(spans), reason)
        )

    def _all(self) -> list[_Run]:
        return [*self._running, *self._waiting]

    def _abort(self, runs: Sequence[_Run]) -> None:
        clock_s = self._clock()
        for run in runs:
            self._end(run, run.tokens_at(clock_s), "abort")
        # All at once, or an aborted one would start in a freed slot.
        self._running.difference_update(runs)
        for run in runs:
            if run in self._waiting:
                self._waiting.remove(run)

    def _count(self, request_id: str) -> None:
        """Count a request; fail it or die, as configured."""
        self.check_health()
        if self.asleep:
            raise GenerationError(f"request {request_id} arrived while the engine slept")
        self._requests += 1
        config = self._config
        if config.die_after is not None and self._requests > config.die_after:
            self._state = "dead, as configured by die_after"
            for run in self._all():
                if not run.result.done():
                    run.result.set_exception(self._death())
            raise self._death()
        if config.fail_every and self._requests % config.fail_every == 0:
            raise GenerationError(f"request {request_id} failed, as configured by fail_every")

    def _random(self, key: str, ids: NDArray[np.int32]) -> np.random.Generator:
        digest = hashlib.blake2b(f"{self._config.seed}/{key}/".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
        return np.random.default_rng(int.from_bytes(digest.digest(), "little"))

    def _draw(self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams) -> _Run:
        config = self._config
        key = request_id if params.seed is None else f"seed {params.seed}"
        rng = self._random(key, prompt_ids)
        # As in vLLM, the stop token itself may come after min_tokens others at the earliest.
        wanted = max(round(config.response_tokens.draw(rng)), params.min_tokens + 1)
        first_token_s = config.first_token_s.draw(rng)
        token_s = config.token_s.draw(rng)
        tokens = min(wanted, params.max_tokens)
        token_ids = rng.integers(0, config.vocab_size or VOCABULARY, tokens, dtype=np.int32)
        # Exponential surprise with mean 0.5 nat: about what a trained model's own samples have.
        logprobs = -rng.exponential(0.5, tokens).astype(np.float32)
        is_stopped = wanted <= params.max_tokens
        if is_stopped:
            token_ids[-1] = config.eos_token_id or 0
        stops = np.flatnonzero(np.isin(token_ids, params.stop_token_ids))
        stops = stops[stops >= params.min_tokens]
        if stops.size:
            is_stopped = True
            tokens = int(stops[0]) + 1
        return _Run(
            request_id,
            token_ids[:tokens],
            logprobs[:tokens],
            "stop" if is_stopped else "length",
            first_token_s,
            token_s,
            asyncio.get_running_loop().create_future(),
        )

    def _death(self) -> EngineDeadError:
        return EngineDeadError(f"the simulated engine is {self._state}")


def build(config: SimulatedConfig, model_dir: Path, version: PolicyVersion) -> SimulatedEngine:
    end = min(eos_ids(model_dir), default=None)
    of_model = {"vocab_size": vocabulary_size(model_dir), "eos_token_id": end}
    given = config.model_dump(include=set(of_model), exclude_none=True)
    return SimulatedEngine(config.model_copy(update=of_model | given), version)
