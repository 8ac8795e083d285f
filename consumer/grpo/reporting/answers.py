"""What the responses of a batch say about learning, by task: `learning_metrics`.

Costs one digest of each response, and comparisons of its last `TAIL` tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from buffer.ids import split_group_id
from buffer.wire.group import UNPARSED, RolloutGroup

TAIL = 256  # newest tokens of a response that are searched for a loop
LONGEST_LOOP = 8  # tokens that are repeated
FEWEST_LOOPED = 6  # a shorter response may be an answer such as 1111
FEWEST_GROUPS = 4  # of a task, from which on equal responses to different prompts are counted
MOST_PARTS = 16  # of a reward, by name, that become metrics

Answer = tuple[int, float | None, bool, bool]
"""A rollout: digest of its tokens, score, whether it ends in a loop, whether it was truncated."""


def answers_of(group: RolloutGroup) -> list[Answer]:
    """Return the rollouts of a group that are of a trained role."""
    ids, ends = group.response_ids, np.cumsum(group.lengths)
    bounds = zip((ends - group.lengths).tolist(), ends.tolist(), strict=True)
    # agents of other roles may give equal answers to other questions
    roles = [role.encode() for role in group.roles]
    digests = [
        # JSON has no larger integers
        xxhash.xxh3_64_intdigest(role + ids[a:b].tobytes()) & ((1 << 53) - 1)
        for role, (a, b) in zip(roles, bounds, strict=True)
    ]
    scores = [score if math.isfinite(score) else None for score in group.scores.tolist()]
    rows = zip(digests, scores, loops(group).tolist(), group.truncated.tolist(), strict=True)
    return [row for row, counts in zip(rows, group.in_training.tolist(), strict=True) if counts]


def loops(group: RolloutGroup) -> NDArray[np.bool_]:
    """Return which responses end in the same few tokens again and again, bool[k]."""
    lengths = np.minimum(group.lengths, TAIL).astype(np.intp)
    width = int(lengths.max(initial=0))
    found = np.zeros(len(lengths), np.bool_)
    if width < FEWEST_LOOPED:
        return found
    # tails at the right of a matrix; padding differs from each token, and is not counted
    places = np.cumsum(group.lengths)[:, None] - width + np.arange(width)
    tails = np.where(
        np.arange(width) >= width - lengths[:, None], group.response_ids[np.maximum(places, 0)], -1
    )
    for period in range(1, min(LONGEST_LOOP, width // 3) + 1):
        same = (tails[:, period:] == tails[:, :-period]) & (tails[:, :-period] >= 0)
        is_long = lengths >= max(FEWEST_LOOPED, 3 * period)
        # the begin of the loop, and an end token, do not continue it
        found |= is_long & (same.sum(1) >= 0.9 * (lengths - period))
    return found


def reward_parts(group: RolloutGroup) -> dict[str, float]:
    """Return the mean of each part of a group's rewards, but for the score itself."""
    if not any(name not in ("score", UNPARSED) for name in group.head.rewards):
        return {}
    columns = group.columns["rewards"][group.in_training]
    names = [*enumerate(group.head.rewards)][: MOST_PARTS + 2]
    return {
        name: float(np.mean(columns[:, n]))
        for n, name in names
        if name not in ("score", UNPARSED) and np.isfinite(columns[:, n]).all()
    }


def learning_metrics(
    gids: Sequence[str], answers: Sequence[Sequence[Answer]], parts: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the metrics of a batch: of each group, its rollouts and the parts of its rewards."""
    by_task: defaultdict[str, list[Sequence[Answer]]] = defaultdict(list)
    means: defaultdict[str, list[float]] = defaultdict(list)
    for gid, own, of_rewards in zip(gids, answers, parts, strict=True):
        task = split_group_id(gid)[0]
        by_task[task].append(own)
        for name, value in of_rewards.items():
            means[f"reward_part/{task}/{name}"].append(value)
    metrics = {name: float(np.mean(values)) for name, values in means.items()}
    for task, groups in by_task.items():
        found = _of_task([group for group in groups if len(group)])
        metrics |= {f"{name}/{task}": value for name, value in found if math.isfinite(value)}
    return metrics


def _of_task(groups: Sequence[Sequence[Answer]]) -> Iterable[tuple[str, float]]:
    sizes = np.array([len(group) for group in groups])
    rows = [answer for group in groups for answer in group]
    if not rows:
        return
    digests, scores, looping, cut = (np.array(column) for column in zip(*rows, strict=True))
    scores = scores.astype(np.float64)  # None becomes nan
    group = np.repeat(np.arange(len(groups)), sizes)
    known = np.isfinite(scores)
    starts = np.cumsum(sizes) - sizes
    ranges = np.fmax.reduceat(scores, starts) - np.fmin.reduceat(scores, starts)
    if known.any():
        yield "reward_range", float(np.nanmax(scores) - np.nanmin(scores))
    if (compared := (sizes > 1) & np.isfinite(ranges)).any():
        yield "equal_groups", float(np.mean(ranges[compared] == 0))
    if len(groups) >= FEWEST_GROUPS:
        yield "same_response", float(np.unique(digests, return_counts=True)[1].max() / len(rows))
    for name, chosen in (("looping", looping), ("at_limit", cut)):
        yield name, float(np.mean(chosen))
        if (scored := chosen & known).any():
            yield f"{name}_reward", float(np.mean(scores[scored]))
    pairs = np.stack([group, digests], 1)[known]
    _, first, inverse = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    if repeats := len(pairs) - len(first):
        own = scores[known]
        differs = np.abs(own - own[first[inverse.reshape(-1)]]) > 1e-6
        yield "judge_disagreement", float(differs.sum() / repeats)
