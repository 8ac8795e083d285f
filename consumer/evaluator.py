"""Metrics of evaluation rollouts. Generates nothing itself: the workers did, on the `eval` lane."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from buffer.group import RolloutGroup

RIGHT = 1.0 - 1e-6
"""Verifiers may give partial credit: only a full score counts as right."""


class Evaluator:
    """Accuracy over all rollouts, and by data source where there are several."""

    def evaluate(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """`eval/accuracy`: share of rollouts with a full score; `eval/score`: mean score; a missing one counts as 0."""
        by_source: dict[str, list[float]] = defaultdict(list)
        for group in groups:
            scores = np.nan_to_num(group.scores, nan=0.0)
            by_source[group.shared.get("data_source") or "all"] += scores.tolist()
        scores = np.concatenate([np.asarray(s) for s in by_source.values()])
        metrics = {
            "eval/accuracy": float((scores >= RIGHT).mean()),
            "eval/score": float(scores.mean()),
            "eval/rollouts": float(len(scores)),
        }
        if len(by_source) > 1:
            metrics |= {
                f"eval/accuracy/{s}": float((np.asarray(v) >= RIGHT).mean()) for s, v in by_source.items()
            }
        return metrics
