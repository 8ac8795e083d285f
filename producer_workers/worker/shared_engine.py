"""The engine of a worker: its groups share it, and the worker pauses it.

Each group that an engine sampled when it died loses a try; a last try is sampled alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.ids import split_group_id
from buffer.job import EndedEarly
from buffer.wire.columns import known_column
from buffer.wire.rollout import (
    MediaRef,
    PolicyVersion,
    RolloutState,
    VersionSpan,
    has_ended,
    no_logprobs,
    no_tokens,
)
from buffer.wire.sampling import SampleParams
from producer_workers.engines.base import (
    AbortsGroups,
    Engine,
    EngineDeadError,
    EngineLoad,
    Generation,
    GenerationError,
    PauseMode,
    ReportsLoad,
    ShowsImages,
    context_length,
    records_masks,
    structures,
)
from producer_workers.worker.inbox import Inbox, Signal
from producer_workers.worker.token_counts import TokenCounts


@dataclass(slots=True)
class Sampled:
    """What was sampled for a group since its claim, including what its agent loop discards.

    `tokens`: how many, by the second part of the request's id, which is the member's index.
    `began`: the weights at its first request, which may wait in the engine for later ones.
    `oldest`: the oldest version of each lineage, of requests that ended.
    """

    began: PolicyVersion
    tokens: Counter[str] = field(default_factory=Counter)
    oldest: dict[str, int] = field(default_factory=dict)


class SharedEngine(Engine):
    """An engine that posts REQUEST_FINISHED after every request, also a failed one.

    `untruncated_tasks`: their requests are refused with sampling parameters that cut off part of
    the distribution (`SampleParams.cuts`). `sampled_with`: the weights of all that the engine
    returned. Only one caller may pause it; any thread may read the flags.
    """

    def __init__(
        self, engine: Engine, inbox: Inbox, untruncated_tasks: Collection[str] = ()
    ) -> None:
        self.name = engine.name
        self._engine = engine
        self._inbox = inbox
        self._untruncated_tasks = frozenset(untruncated_tasks)
        self.is_paused = self.is_asleep = False
        self.sampled_with = set[PolicyVersion]()
        self._alone = set[str]()  # gids that are sampled beside no other group
        self._sampled_at_death = set[str]()  # gids
        self._sampled: dict[str, Sampled] = {}  # by gid
        self._running = Counter[str]()
        self._waiting_alone = Counter[str]()
        self._changed = asyncio.Event()
        self.token_counts = TokenCounts()

    @property
    def max_model_len(self) -> int | None:
        return context_length(self._engine)

    @property
    def structures_output(self) -> bool:
        return structures(self._engine)

    # -- sampling ------------------------------------------------------------

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        """Sample one response; it ends with "length" where the context is full."""
        gid = request_id.partition("/")[0]
        self._check_params(gid, params)
        if (context := self.max_model_len) is not None:
            room = context - len(prompt_ids)
            if room < 1:
                return Generation(no_tokens(), no_logprobs(), (), "length")
            params = params.within(room)
        await self._wait_for_turn(gid)
        try:
            with self._counted(self._running, gid):
                # the death of an engine that is dead already is not this group's doing
                self._engine.check_health()
                sampled = self._sampled.setdefault(gid, Sampled(self._engine.version()))
                try:
                    with self.token_counts.request(gid, len(prompt_ids)) as tally:
                        made = await self._engine.generate(request_id, prompt_ids, params)
                        tally.tokens = max(tally.tokens, len(made.token_ids))
                except EngineDeadError:
                    self._sampled_at_death.add(gid)
                    raise
            _check_generation(self._engine.name, made, prompt_ids, params)
            for span in made.spans:
                self.sampled_with.add(PolicyVersion(span.lineage, span.version))
            member = request_id.removeprefix(f"{gid}/").partition("/")[0]
            sampled.tokens[member] += len(made.token_ids)
            _lower(sampled.oldest, made.spans)
            return made
        finally:
            self._inbox.post(Signal.REQUEST_FINISHED)

    def _check_params(self, gid: str, params: SampleParams) -> None:
        """Raise GenerationError for parameters that the engine or the trainer does not support."""
        # an engine that ignored the structure would only look like a bad model
        if params.structured and not self.structures_output:
            hint = "use [engine] kind vllm, or http with a server that has `structured_outputs`"
            message = f"the engine {self._engine.name} cannot generate structured output"
            raise GenerationError(message, hint=hint)
        is_masked = records_masks(self._engine)
        changed = params.changes(masked=is_masked) if self._untruncated_tasks else ""
        if changed and split_group_id(gid)[0] in self._untruncated_tasks:
            message = (
                f"sampling with {changed} gives logprobs of another distribution than training"
            )
            hint = "do without it, or set [learner] allow_truncated_sampling = true"
            if not is_masked and not params.changes(masked=True):
                hint += "; or, with [engine] kind vllm or transformers, sampling_mask = true"
            raise GenerationError(message, hint=hint)

    async def _wait_for_turn(self, gid: str) -> None:
        async def next_change() -> None:
            self._changed.clear()
            await self._changed.wait()

        if gid not in self._alone:
            # groups that want to be alone go first
            while self._waiting_alone or self._running.keys() & self._alone:
                await next_change()
            return
        with self._counted(self._waiting_alone, gid):
            while self._running.keys() - {gid}:
                await next_change()

    @contextmanager
    def _counted(self, counter: Counter[str], gid: str) -> Iterator[None]:
        counter[gid] += 1
        try:
            yield
        finally:
            counter.subtract((gid,))
            counter += Counter()  # drops a count of 0
            self._changed.set()

    # -- groups --------------------------------------------------------------

    def sample_alone(self, gid: str) -> None:
        """Sample a group beside no other one, until `forget`."""
        self._alone.add(gid)

    def forget(self, gid: str) -> None:
        """Drop what is known of a group that ends."""
        self._alone.discard(gid)
        self._sampled.pop(gid, None)
        self.token_counts.end(gid)

    def blame(self, gid: str, *, is_last_try: bool) -> bool:
        """Return whether the death of the engine uses up a try of this group; asked once."""
        # the worker may claim the group again before it knows that its engine is dead
        was_sampled = gid in self._sampled_at_death
        self._sampled_at_death.discard(gid)
        # a last try only if it was alone: no group ends because of another one
        return was_sampled and (not is_last_try or gid in self._alone)

    def first_weights(self, gid: str) -> PolicyVersion | None:
        """Return the weights at the first request of a group since its claim."""
        sampled = self._sampled.get(gid)
        return sampled.began if sampled else None

    @contextmanager
    def shown(self, gid: str, refs: Sequence[MediaRef]) -> Iterator[None]:
        """Show images to the requests of group `gid` in the block. Raises GenerationError."""
        if not refs:
            yield
            return
        if not isinstance(self._engine, ShowsImages):
            hint = "use [engine] kind vllm, or leave such tasks out of [worker] tasks"
            raise GenerationError(
                f"{gid} has images, which the engine {self.name} cannot show", hint=hint
            )
        self._engine.images.show(gid, refs)
        try:
            yield
        finally:
            self._engine.images.forget(gid)

    def ended_early(
        self, gid: str, known_tokens: int, states: Sequence[RolloutState]
    ) -> EndedEarly:
        """Return the counts of a group that ends early.

        `known_tokens`: it had when it was claimed. `states`: as its agent loop left them.
        """
        sampled = self._sampled.get(gid)
        tokens = known_tokens + (sampled.tokens.total() if sampled else 0)
        oldest = dict(sampled.oldest) if sampled else {}
        _lower(oldest, (span for state in states for span in state.spans))
        in_ended = sum(len(state.response_ids) for state in states if has_ended(state))
        most = sum(state.sample_params.max_tokens for state in states if not has_ended(state))
        return EndedEarly(tokens, max(0, most - (tokens - in_ended)), oldest)

    def lengths(self, gid: str, states: Sequence[RolloutState]) -> tuple[list[int], list[int]]:
        """Return the lengths of responses that ended, and of others, which were cut.

        A response that was discarded counts, too; one that did not begin does not.
        """
        sampled = self._sampled.get(gid)
        tokens = sampled.tokens if sampled else Counter[str]()
        ended = [len(state.response_ids) for state in states if has_ended(state)]
        others = (state for state in states if not has_ended(state))
        cut = [len(state.response_ids) or tokens[str(state.index)] for state in others]
        return ended, [length for length in cut if length]

    # -- pauses --------------------------------------------------------------

    def load(self) -> EngineLoad | None:
        """Return how full the engine is; None if it does not report that."""
        return self._engine.load() if isinstance(self._engine, ReportsLoad) else None

    async def start(self) -> None:
        await self._engine.start()

    async def shutdown(self) -> None:
        await self._engine.shutdown()

    def version(self) -> PolicyVersion:
        return self._engine.version()

    def check_health(self) -> None:
        self._engine.check_health()

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        await self._engine.load_weights(path, version)

    async def pause(self, mode: PauseMode) -> None:
        """End all requests or ("keep") freeze them, and sample nothing until `resume`."""
        if mode == "abort" or not self.is_paused:
            await self._engine.pause(mode)
            self.is_paused = True

    async def resume(self) -> None:
        if self.is_paused:
            await self._engine.resume()
            self.is_paused = False

    async def sleep(self) -> None:
        """Leave the device's memory to another process until `wake`. Nothing may be running."""
        if not self.is_asleep:
            await self._engine.sleep()
            self.is_asleep = True

    async def wake(self) -> None:
        if self.is_asleep:
            await self._engine.wake()
            self.is_asleep = False

    async def abort(self, spared: Collection[str] = ()) -> None:
        """End all requests but those of the groups `spared`, and sample later requests."""
        if not spared:
            await self.pause("abort")
        await self.resume()
        if spared:
            await self.abort_groups_but(spared)

    async def abort_groups_but(self, spared: Collection[str]) -> bool:
        """Abort, also while the engine is frozen. Return False if the engine cannot."""
        if not isinstance(self._engine, AbortsGroups):
            return False
        await self._engine.abort_others(spared)
        return True


def _lower(oldest: dict[str, int], spans: Iterable[VersionSpan]) -> None:
    for span in spans:
        if span.length:
            oldest[span.lineage] = min(span.version, oldest.get(span.lineage, span.version))


def _check_generation(
    engine: str, made: Generation, prompt_ids: NDArray[np.int32], params: SampleParams
) -> None:
    """Raise GenerationError for too many tokens, missing logprobs, or a wrong column."""
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
    recorded = {name: value for name, value in made.columns.items() if value is not None}
    if not (tokens and recorded):
        return
    response = RolloutState(
        prompt_ids=prompt_ids, response_ids=made.token_ids, logprobs=made.logprobs
    )
    for name, value in recorded.items():
        try:
            column = known_column(name)
            problem = column.problem(column.read(value), response)
        except (WireError, TypeError, ValueError) as error:
            problem = str(error)
        if problem:
            raise GenerationError(f"the engine {engine} returned a wrong column: {problem}")
