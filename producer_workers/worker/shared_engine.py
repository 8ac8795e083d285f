"""The engine as the groups of a worker see it: they share it, but a last try has it alone.

That is how a prompt that kills engines is found. Everything that was sampled when an engine died is
a suspect; a group that was sampled alone is guilty.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.control.control import ControlState
from buffer.model.ids import split_group_id
from buffer.model.job import EndedEarly
from buffer.redis.connection.retry import Backoff
from buffer.rollouts.rollout import (
    PolicyVersion,
    RolloutState,
    VersionSpan,
    has_ended,
    no_logprobs,
    no_tokens,
)
from buffer.rollouts.sampling import SampleParams
from producer_workers.engines.base import (
    AbortsGroups,
    Engine,
    EngineDeadError,
    EngineLoad,
    Generation,
    GenerationError,
    ReceivesWeights,
    ReportsLoad,
    WeightsError,
    context_length,
    structures,
)
from producer_workers.worker.inbox import Inbox, RequestFinished
from producer_workers.worker.weight_updates import Fetched, NextWeights, WeightSource

log = logging.getLogger("rolloutmq.worker")


class SharedEngine:
    """An engine that posts a RequestFinished after every request, also a failed one.

    `untruncated_tasks`: their tokens must be sampled from the model's whole distribution, also
    where a row of the data set or an agent asks for something else.

    `alone`: gids that are sampled beside no other group. `suspects`: gids that were sampled when
    the engine died. `tokens`: what was sampled for each group. `sampled_with`: the weights of all
    that the engine returned. Everything but `generate` is the engine's own.
    """

    def __init__(
        self, engine: Engine, inbox: Inbox, untruncated_tasks: Collection[str] = ()
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._untruncated_tasks = frozenset(untruncated_tasks)
        self.alone = set[str]()
        self.suspects = set[str]()
        self.sampled_with = set[PolicyVersion]()
        self.tokens = GroupTokens()
        self._sampled = Counter[str]()
        self._waiting_alone = Counter[str]()
        self._changed = asyncio.Event()

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        """Sample one response, see `Engine.generate`.

        It ends with "length" at the end of the engine's context, without a token where the prompt
        fills the context.
        """
        self._check_params(request_id, params)
        if (context := context_length(self._engine)) is not None:
            room = context - len(prompt_ids)
            if room < 1:
                return Generation(no_tokens(), no_logprobs(), (), "length")
            params = params.within(room)
        gid = request_id.partition("/")[0]
        await self._wait_for_turn(gid)
        try:
            with self._counted(self._sampled, gid):
                # the death of an engine that is dead already is not this group's doing
                self._engine.check_health()
                return await self._ask(gid, request_id, prompt_ids, params)
        finally:
            self._inbox.post(RequestFinished())

    def _check_params(self, request_id: str, params: SampleParams) -> None:
        """Raise GenerationError for what the engine cannot do, or the trainer cannot train on."""
        # an engine that ignored the structure would only look like a bad model
        if params.structured and not structures(self._engine):
            hint = "use [engine] kind vllm, or http with a server that has `structured_outputs`"
            message = f"the engine {self._engine.name} cannot generate structured output"
            raise GenerationError(message, hint=hint)
        cuts = params.cuts() if self._untruncated_tasks else ""
        if cuts and split_group_id(request_id.partition("/")[0])[0] in self._untruncated_tasks:
            message = f"sampling with {cuts} gives logprobs of another distribution than training"
            hint = "do without it, or set [learner] allow_truncated_sampling = true"
            raise GenerationError(message, hint=hint)

    async def _ask(
        self, gid: str, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        self.tokens.begin(gid, self._engine.version())
        try:
            made = await self._engine.generate(request_id, prompt_ids, params)
        except EngineDeadError:
            self.suspects.add(gid)
            raise
        _check_generation(self._engine.name, made, params)
        self.sampled_with.update(PolicyVersion(span.lineage, span.version) for span in made.spans)
        self.tokens.add(gid, made)
        return made

    async def _wait_for_turn(self, gid: str) -> None:
        if gid not in self.alone:
            # groups that want to be alone go first
            while self._waiting_alone or self._sampled.keys() & self.alone:
                await self._next_change()
            return
        with self._counted(self._waiting_alone, gid):
            while self._sampled.keys() - {gid}:
                await self._next_change()

    @contextmanager
    def _counted(self, counter: Counter[str], gid: str) -> Iterator[None]:
        counter[gid] += 1
        try:
            yield
        finally:
            counter.subtract((gid,))
            counter += Counter()  # drops a count of 0
            self._changed.set()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _check_generation(engine: str, made: Generation, params: SampleParams) -> None:
    """Raise GenerationError for more tokens than were requested, or for missing logprobs."""
    tokens = len(made.token_ids)
    if tokens > params.max_tokens:
        raise GenerationError(
            f"the engine {engine} returned {tokens} tokens where {params.max_tokens} were allowed",
            hint="check that it applies max_tokens",
        )
    if len(made.logprobs) != tokens or not np.isfinite(made.logprobs).all():
        raise GenerationError(
            f"the engine {engine} returned {tokens} tokens without a finite logprob for each",
            hint="check the model's weights and their number format",
        )


BACKOFF = Backoff(0.5, 30.0, jitter=0.0)
"""Pauses before refused weights are tried again: each attempt reads the whole folder."""


class ControlledEngine:
    """An engine, and what must be remembered of it between two control states.

    One caller at a time; `version`, `load` and the flags may be read on any thread.
    """

    def __init__(self, engine: Engine, source: WeightSource, inbox: Inbox) -> None:
        self._engine = engine
        self._source = source
        self._next = NextWeights(engine, source, inbox)
        self.is_paused = self.is_asleep = False
        self.refusal = ""
        """the weights that could not be loaded, and why; "" once newer ones are loaded"""
        self._refused: PolicyVersion | None = None
        self._retry_at = 0.0
        self._refusals = 0

    def version(self) -> PolicyVersion:
        """Return the weights that the engine runs."""
        return self._engine.version()

    def load(self) -> EngineLoad | None:
        """Return how full the engine is; None if it does not report that."""
        return self._engine.load() if isinstance(self._engine, ReportsLoad) else None

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine is gone."""
        self._engine.check_health()

    def has_weights_of(self, state: ControlState) -> bool:
        """Return whether the engine runs the newest weights."""
        return state.weights == self._engine.version()

    async def freeze(self) -> None:
        """Sample nothing until `thaw`."""
        if not self.is_paused:
            await self._engine.pause("keep")
            self.is_paused = True

    async def thaw(self) -> None:
        """Sample again what was frozen."""
        if self.is_paused:
            await self._engine.resume()
            self.is_paused = False

    async def sleep(self) -> None:
        """Leave the device's memory to another process until `wake`. Nothing may be running."""
        if not self.is_asleep:
            await self._engine.sleep()
            self.is_asleep = True

    async def wake(self) -> None:
        """Take the device's memory back."""
        if self.is_asleep:
            await self._engine.wake()
            self.is_asleep = False

    async def abort(self, spared: Collection[str] = ()) -> None:
        """End all requests but those of the groups `spared`, and sample later requests."""
        if spared:
            await self.thaw()
            await self.abort_others(spared)
            return
        await self.halt()
        await self.thaw()

    async def abort_others(self, spared: Collection[str]) -> bool:
        """End all requests but those of the groups `spared`, also while nothing is sampled.

        Return False where the engine cannot.
        """
        if not isinstance(self._engine, AbortsGroups):
            return False
        await self._engine.abort_others(spared)
        return True

    async def halt(self) -> None:
        """End all requests, and sample nothing until `thaw`."""
        await self._engine.pause("abort")
        self.is_paused = True

    async def update(self, state: ControlState) -> bool:
        """Load the newest weights, once they are at hand. Return whether the engine has them.

        They are fetched in the background, while the engine samples, unless it is frozen.
        """
        if self.has_weights_of(state):
            return True
        if self._refused and state.announced:
            return False  # weights that cannot be loaded are not tried again just before the next
        if self._refused == state.weights and not self._is_retry_due():
            return False
        started = time.monotonic()
        try:
            fetched = self._next.take(state.published)
            if fetched is None or not await self._load(fetched, state):
                return False
        except WeightsError as error:
            self._refuse(state.weights, error)
            return False
        self._refused = None
        self.refusal = ""
        await asyncio.to_thread(self._source.keep_only, fetched.folder)
        seconds = time.monotonic() - started
        log.info("weights loaded", extra={"weights": str(state.weights), "seconds": seconds})
        return True

    def prepare(self, state: ControlState) -> bool:
        """Fetch the weights that are announced. Return whether that has ended, well or not."""
        announced = state.announced
        if announced is None or announced.weights == self._engine.version():
            return True
        if not self.has_weights_of(state) and not self._refused:
            return False  # one fetch at a time: first the newest
        if self._refused == announced.weights and not self._is_retry_due():
            return True
        try:
            return self._next.has(announced)
        except WeightsError as error:
            self._refuse(announced.weights, error)
            return True

    async def _load(self, fetched: Fetched, state: ControlState) -> bool:
        """Load from the trainer's memory, or from the folder. False: the folder is fetched next."""
        engine = self._engine
        if fetched.announced is None:
            await engine.load_weights(fetched.folder, state.weights)
            return True
        assert isinstance(engine, ReceivesWeights)
        try:
            await engine.receive_weights(fetched.announced, state.weights)
        except WeightsError as error:
            log.warning("cannot receive from the trainer, reading the folder: %s", error)
            self._next.begin(state.published, may_receive=False)
            return False
        return True

    async def close(self) -> None:
        """Delete downloaded weights. No more will be loaded."""
        await self._next.close()

    def _is_retry_due(self) -> bool:
        return time.monotonic() >= self._retry_at

    def _refuse(self, weights: PolicyVersion, error: WeightsError) -> None:
        """Log a refusal, once for every version, and plan the next try."""
        self.refusal = f"{weights} {error}"
        if self._refused != weights:
            self._refused = weights
            self._refusals = 0
            log.error("weights refused, staying on %s: %s", self._engine.version(), error)
        self._retry_at = time.monotonic() + BACKOFF.pause_s(self._refusals)
        self._refusals += 1


@dataclass(slots=True)
class Sampled:
    """What was sampled for a group since its claim.

    `began`: the weights at its first request; the first token may be of later ones, if the request
    waited in the engine. `oldest`: the oldest version of each lineage, of requests that ended.
    """

    began: PolicyVersion
    tokens: int = 0
    oldest: dict[str, int] = field(default_factory=dict)


class GroupTokens:
    """The counts of one engine, by gid. `began` may be called on any thread."""

    def __init__(self) -> None:
        self._groups: dict[str, Sampled] = {}

    def begin(self, gid: str, weights: PolicyVersion) -> None:
        """Note a request of a group."""
        self._groups.setdefault(gid, Sampled(weights))

    def add(self, gid: str, made: Generation) -> None:
        """Count what a request returned."""
        if sampled := self._groups.get(gid):
            sampled.tokens += len(made.token_ids)
            _lower(sampled.oldest, made.spans)

    def began(self, gid: str) -> PolicyVersion | None:
        """Return the weights at the first request of a group; None before it."""
        sampled = self._groups.get(gid)
        return sampled.began if sampled else None

    def forget(self, gid: str) -> None:
        """Drop the counts of a group that has ended."""
        self._groups.pop(gid, None)

    def ended_early(
        self, gid: str, known_tokens: int, states: Sequence[RolloutState]
    ) -> EndedEarly:
        """Return what a group has that is ended early.

        `known_tokens`: it had when it was claimed. `states`: as its agent loop left them.
        """
        sampled = self._groups.get(gid)
        tokens = known_tokens + (sampled.tokens if sampled else 0)
        oldest = dict(sampled.oldest) if sampled else {}
        _lower(oldest, (span for state in states for span in state.spans))
        in_ended = sum(len(state.response_ids) for state in states if has_ended(state))
        most = sum(state.sample_params.max_tokens for state in states if not has_ended(state))
        return EndedEarly(tokens, max(0, most - (tokens - in_ended)), oldest)


def _lower(oldest: dict[str, int], spans: Iterable[VersionSpan]) -> None:
    """Lower the oldest version of each lineage to those of `spans`."""
    for span in spans:
        if span.length:
            oldest[span.lineage] = min(span.version, oldest.get(span.lineage, span.version))
