"""The judge that asks teachers how likely they find the tokens of a group's rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from buffer.errors import JudgeError
from buffer.wire.rollout import RolloutState
from producer_workers.config.attached_judge import ColumnJudge
from producer_workers.config.engine import HttpConfig
from producer_workers.config.producing import ProducingConfig
from producer_workers.config.task import JudgingSection
from producer_workers.engines.base import Scores
from rolloutmq.extensions.teacher.model import Loaded, Model, Served
from rolloutmq.extensions.teacher.settings import TeacherSection, all_teachers


def make_judges(
    config: ProducingConfig, by_task: Mapping[str, Mapping[str, TeacherSection]]
) -> dict[str, TeacherJudge]:
    """Return the judge of each task that has teachers; tasks share the models."""
    models: dict[str, Model] = {}
    for name, section in all_teachers(config).items():
        tasks = [task for task, teachers in by_task.items() if name in teachers]
        kind = Served if isinstance(section.settings(config), HttpConfig) else Loaded
        if tasks:
            models[name] = kind(name, section, config, tasks)
    return {
        task: TeacherJudge(teachers, models, config.tasks[task].judging)
        for task, teachers in by_task.items()
        if teachers
    }


class TeacherJudge(ColumnJudge):
    """Returns the columns of one task's teachers. `models` may have those of other tasks, too."""

    name = "teachers"

    def __init__(
        self,
        teachers: Mapping[str, TeacherSection],
        models: Mapping[str, Model],
        judging: JudgingSection,
    ) -> None:
        self._teachers = teachers
        self._models = {name: models[name] for name in teachers}
        self._judging = judging

    async def open(self) -> None:
        for model in self._models.values():
            await model.open()

    async def close(self) -> None:
        for model in self._models.values():
            await model.close()

    async def ask(self, states: Sequence[RolloutState]) -> list[Mapping[str, Any]]:
        """Return the columns of each rollout; {} for one without a token that is trained."""
        if states[0].multimodal:
            raise JudgeError("teachers see no images, and the prompt has some")
        asked = {
            (n, name): asyncio.ensure_future(self._score(name, state))
            for n, state in enumerate(states)
            for name, section in self._teachers.items()
            if section.scores(state.data_source) and _is_trained(state)
        }
        try:
            await asyncio.gather(*asked.values())
        finally:
            for call in asked.values():
                call.cancel()
        scores = [
            {name: call.result() for (m, name), call in asked.items() if m == n}
            for n in range(len(states))
        ]
        return [_columns(own) for own in scores]

    async def _score(self, name: str, state: RolloutState) -> Scores:
        assert state.prompt_ids is not None
        text = np.concatenate([state.prompt_ids, state.response_ids])
        start = len(state.prompt_ids)
        top_k = self._teachers[name].top_k
        scores = await self._models[name].score(text, max(1, start), top_k, self._judging)
        if start:
            return scores
        # a first token has no context and was not sampled: 0 for it
        return Scores(
            np.pad(scores.logprobs, (1, 0)),
            np.pad(scores.top_ids, ((1, 0), (0, 0))),
            np.pad(scores.top_logprobs, ((1, 0), (0, 0))),
        )


def _is_trained(state: RolloutState) -> bool:
    mask = state.response_mask
    return bool(len(state.response_ids) and (mask is None or mask.any()))


def _columns(scores: Mapping[str, Scores]) -> Mapping[str, Any]:
    """Return the columns of a rollout, from its scores by each teacher."""
    tops = {name: own for name, own in scores.items() if own.top_ids.shape[1]}
    columns = {
        "teacher_logprobs": {name: own.logprobs for name, own in scores.items()},
        "teacher_top_ids": {name: own.top_ids for name, own in tops.items()},
        "teacher_top_logprobs": {name: own.top_logprobs for name, own in tops.items()},
    }
    return {name: rows for name, rows in columns.items() if rows}
