"""A teacher: a model that scores the tokens of completed groups, and adds its columns to them.

It loads no weights that the trainer publishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from buffer.control.control import ControlState
from buffer.groups.job_queue import Serves
from buffer.wire.group import RolloutGroup
from buffer.wire.teacher_columns import with_teacher
from producer_workers.engines.base import GenerationError, Scores, ScoresTexts


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the worker of a teacher does. `top_k`: by task, of all that it serves.

    `vocabulary`: how many token ids the student has; None if it is not known.
    """

    name: str
    top_k: Mapping[str, int]
    vocabulary: int | None = None

    @property
    def serves(self) -> Serves:
        return Serves(frozenset(self.top_k), teacher=self.name)

    async def scored(self, group: RolloutGroup, engine: ScoresTexts) -> RolloutGroup:
        """Return the group with this teacher's columns. Raises GenerationError, EngineDeadError."""
        if group.shared.multimodal:
            raise GenerationError(f"{group.gid} shows images, which teachers do not see")
        responses = np.split(group.response_ids, np.cumsum(group.lengths)[:-1])
        calls = [
            asyncio.ensure_future(self._score(f"{group.gid}/{n}", group, response, engine))
            for n, response in enumerate(responses)
            if len(response)
        ]
        try:
            scores = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        if not scores:
            return group
        columns = zip(*map(astuple, scores), strict=True)
        logprobs, top_ids, top_logprobs = (np.concatenate(parts) for parts in columns)
        self._check_ids(group.gid, top_ids)
        return with_teacher(group, self.name, logprobs, (top_ids, top_logprobs))

    async def _score(
        self,
        request_id: str,
        group: RolloutGroup,
        response: NDArray[np.int32],
        engine: ScoresTexts,
    ) -> Scores:
        text = np.concatenate([group.prompt_ids, response])
        start = len(group.prompt_ids)
        scores = await engine.score(request_id, text, max(1, start), self.top_k[group.task])
        if start:
            return scores
        # a first token has no context and was not sampled: 0 for it
        return Scores(
            np.pad(scores.logprobs, (1, 0)),
            np.pad(scores.top_ids, ((1, 0), (0, 0))),
            np.pad(scores.top_logprobs, ((1, 0), (0, 0))),
        )

    def _check_ids(self, gid: str, top_ids: NDArray[np.int32]) -> None:
        most = int(top_ids.max(initial=0))
        if self.vocabulary is not None and most >= self.vocabulary:
            raise GenerationError(
                f"{gid}: teacher {self.name} names token {most}, and the student has only "
                f"{self.vocabulary} token ids",
                hint="set top_k = 0, or take a teacher with as many token ids as the student",
            )


class FixedWeights:
    """In place of `WeightUpdates`: a teacher loads no published weights."""

    refusal = ""

    def are_newest(self, _: ControlState) -> bool:
        return True

    async def update(self, _: ControlState) -> bool:
        return True

    def prepare(self, _: ControlState) -> bool:
        return True

    async def close(self) -> None: ...
