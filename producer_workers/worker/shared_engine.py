"""The engine as the groups of a worker see it: they share it, but a last try has it alone.

That is how a prompt that kills engines is found. Everything that was sampled when an engine died is
a suspect; a group that was sampled alone is guilty.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.model.ids import split_group_id
from buffer.rollouts.rollout import PolicyVersion, no_logprobs, no_tokens
from buffer.rollouts.sampling import SampleParams
from producer_workers.engines.base import (
    Engine,
    EngineDeadError,
    Generation,
    GenerationError,
    context_length,
    structures,
)
from producer_workers.worker.group_tokens import GroupTokens
from producer_workers.worker.inbox import Inbox, RequestFinished


class SharedEngine:
    """An engine that posts a RequestFinished after every request, also a failed one.

    `uncut_tasks`: tasks whose tokens must be sampled from the model's whole distribution, also
    where a row of the data set or an agent asks for something else.

    `alone`: gids that are sampled beside no other group. `suspects`: gids that were sampled when
    the engine died. `tokens`: what was sampled for each group. `sampled_with`: the weights of all
    that the engine returned. Everything but `generate` is the engine's own.
    """

    def __init__(self, engine: Engine, inbox: Inbox, uncut_tasks: Collection[str] = ()) -> None:
        self._engine = engine
        self._inbox = inbox
        self._uncut_tasks = frozenset(uncut_tasks)
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
        cuts = params.cuts() if self._uncut_tasks else ""
        if cuts and split_group_id(request_id.partition("/")[0])[0] in self._uncut_tasks:
            message = f"sampling with {cuts} gives logprobs of another distribution than training"
            hint = "do without it, or set [learner] accept_cut_distribution = true"
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
