"""Metrics of evaluation rollouts. Generates nothing itself: the workers did, on the `eval` lane."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from buffer.group import RolloutGroup

RIGHT = 1.0 - 1e-6
"""Verifiers may give partial credit: only a full score counts as right."""

Metric = Callable[[Sequence[RolloutGroup]], dict[str, float]]


class Evaluator:
    """Accuracy and mean score; pass@k where a prompt was asked several times; by data source where there are several.

    `metric`: more of yours, a function of the groups; its names are put behind `eval/`.
    """

    def __init__(self, metric: Metric | None = None) -> None:
        self._metric = metric

    def evaluate(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """`eval/accuracy`: share of rollouts with a full score; `eval/score`: mean score; a missing one counts as 0.

        `eval/pass@1`, `@2`, `@4` … up to the rollouts of the smallest group: the chance that one of k is right
        (unbiased, Chen et al. 2021, arXiv:2107.03374, equation 1); `eval/avg_pass@k` is the mean of these.
        """
        by_source: dict[str, list[RolloutGroup]] = defaultdict(list)
        for group in groups:
            by_source[group.shared.get("data_source") or "all"].append(group)
        metrics = _measure(groups) | (self._metric(groups) if self._metric else {})
        metrics |= {"rollouts": float(sum(len(group) for group in groups)), "groups": float(len(groups))}
        if len(by_source) > 1:
            for source, part in by_source.items():
                metrics |= {f"{name}/{source}": value for name, value in _measure(part).items()}
        return {f"eval/{name}": value for name, value in metrics.items()}


def _measure(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    scores = [np.nan_to_num(group.scores, nan=0.0) for group in groups]
    everything = np.concatenate(scores)
    metrics = {"accuracy": float((everything >= RIGHT).mean()), "score": float(everything.mean())}
    return metrics | _pass_at(scores)


def _pass_at(scores: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    attempts = min(len(group) for group in scores)
    if attempts < 2:
        return {}
    powers = [2**n for n in range(attempts.bit_length()) if 2**n <= attempts]
    chances = {f"pass@{k}": float(np.mean([_chance(group >= RIGHT, k) for group in scores])) for k in powers}
    return chances | {"avg_pass@k": sum(chances.values()) / len(chances)}


def _chance(right: NDArray[np.bool_], k: int) -> float:
    """That at least one of k rollouts, drawn without putting back, is right."""
    return 1.0 - comb(int((~right).sum()), k) / comb(len(right), k)
