"""Combine judges by the data source of a problem, and by weight.

    judge = {
        gsm8k = "gsm8k",
        "code/*" = { python_tests = 0.9, "my_module:style" = 0.1 },
        "*" = "exact_match",
    }

The first pattern that matches `data_source` counts (`*` and `?` as in file names). Scores add up by
their weights; the reward also contains the score of each judge under its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from buffer.errors import JudgeError
from buffer.wire.group import UNPARSED
from buffer.wire.rollout import RolloutState
from producer_workers.judges.judge import AnyJudge, GroupJudge, judge_all

Weighted = Sequence[tuple[AnyJudge, float]]


class ComposedJudge:
    """Judges by `branches`, from pattern to judges with weights.

    It sees whole groups, since one of its judges may need them.
    """

    name = "composed"

    def __init__(self, branches: Mapping[str, Weighted]) -> None:
        self._branches = branches

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """Return the reward of one rollout."""
        return (await self.judge_group([state]))[0]

    async def judge_group(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        """See `GroupJudge`. All rollouts of a group have one data source."""
        judges = self._judges_of(states[0].data_source)
        columns = await asyncio.gather(*(judge_all(judge, states) for judge, _ in judges))
        weights = [weight for _, weight in judges]
        names = [judge.name for judge, _ in judges]
        return [_sum(names, weights, rewards) for rewards in zip(*columns, strict=True)]

    def _judges_of(self, source: str | None) -> Weighted:
        for pattern, judges in self._branches.items():
            if fnmatchcase(source or "", pattern):
                return judges
        known = ", ".join(self._branches)
        raise JudgeError(
            f"no judge for data source {source!r}", hint=f'known: {known}; "*" fits every source'
        )


class ComposedSingleJudge:
    """The same where no judge needs the group: a rollout is judged as soon as it ended."""

    name = "composed"

    def __init__(self, composed: ComposedJudge) -> None:
        self.judge = composed.judge


def compose(branches: Mapping[str, Weighted]) -> AnyJudge:
    """Combine many judges into one."""
    composed = ComposedJudge(branches)
    sees_group = any(
        isinstance(judge, GroupJudge) for judges in branches.values() for judge, _ in judges
    )
    return composed if sees_group else ComposedSingleJudge(composed)


def _sum(
    names: Sequence[str], weights: Sequence[float], rewards: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Return the weighted sum; a single judge of weight 1 keeps its reward."""
    if len(rewards) == 1 and weights[0] == 1.0:
        return rewards[0]
    parts = {name: reward["score"] for name, reward in zip(names, rewards, strict=True)}
    score = sum(weight * reward["score"] for weight, reward in zip(weights, rewards, strict=True))
    unparsed = [reward[UNPARSED] for reward in rewards if UNPARSED in reward]
    return {**parts, "score": score} | ({UNPARSED: min(unparsed)} if unparsed else {})
