"""Metrics of evaluation rollouts, which workers generated on the `eval` lane."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from buffer.group import RolloutGroup

FULL_SCORE = 1.0 - 1e-6
"""Verifiers may give partial credit: only a full score counts as right."""

Metric = Callable[[Sequence[RolloutGroup]], dict[str, float]]


class Evaluator:
    """Compute accuracy, mean score and pass@k, in total and by data source where there are several.

    `metric`: a function of the groups that returns further metrics; their names get the prefix
    `eval/`.

        metrics = Evaluator().evaluate(groups)    # {"eval/accuracy": 0.5, "eval/pass@1": 0.5, ...}
    """

    def __init__(self, metric: Metric | None = None) -> None:
        self._metric = metric

    def evaluate(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Return the metrics of the groups.

        `eval/accuracy`: share of rollouts with a full score. `eval/score`: mean score; a missing
        one counts as 0. `eval/pass@1`, `@2`, `@4` … up to the size of the smallest group, where it
        has several rollouts: the probability that at least one of k is right (unbiased, Chen et al.
        2021, arXiv:2107.03374, equation 1). `eval/avg_pass@k`: the mean of these.
        """
        metrics = _measure(groups)
        if self._metric:
            metrics |= self._metric(groups)
        metrics["rollouts"] = float(sum(len(group) for group in groups))
        metrics["groups"] = float(len(groups))
        by_source: dict[str, list[RolloutGroup]] = defaultdict(list)
        for group in groups:
            by_source[group.shared.get("data_source") or "all"].append(group)
        if len(by_source) > 1:
            for source, part in by_source.items():
                metrics |= {f"{name}/{source}": value for name, value in _measure(part).items()}
        return {f"eval/{name}": value for name, value in metrics.items()}


def _measure(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    scores = [np.nan_to_num(group.scores, nan=0.0) for group in groups]
    column = np.concatenate(scores)
    metrics = {"accuracy": float((column >= FULL_SCORE).mean()), "score": float(column.mean())}
    return metrics | _pass_at(scores)


def _pass_at(scores: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    smallest = min(len(group) for group in scores)
    if smallest < 2:
        return {}
    metrics = {}
    for exponent in range(smallest.bit_length()):
        k = 2**exponent
        probabilities = [_probability(group >= FULL_SCORE, k) for group in scores]
        metrics[f"pass@{k}"] = float(np.mean(probabilities))
    return metrics | {"avg_pass@k": sum(metrics.values()) / len(metrics)}


def _probability(right: NDArray[np.bool_], k: int) -> float:
    """Return the probability that one of k rollouts, drawn without replacement, is right."""
    wrong = int((~right).sum())
    return 1.0 - comb(wrong, k) / comb(len(right), k)
