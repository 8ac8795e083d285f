"""The metrics of one train step, but for those of the learner: what the batch was, and what was produced meanwhile.

rewards/mean min max           scores of the batch
rewards/solved                 share of groups with a score above 0
raw_rewards/mean               scores of all that was completed since the last step, before filtering
advantages/mean min max        as the loss gets them
response_len/mean min max std  tokens; response_len/tokens: all of the batch; prompt_len/mean
staleness/mean max             train steps, of the groups when they were taken
task/n mean_s p50_s p99_s      seconds that workers spent on the groups of the batch; task/p99_p50_ratio
async/*                        groups left in the pools; and since the last step: failed, filtered, expired
throughput/*                   samples and tokens per second and per GPU: of training, since the start; of this
                               step; of its training alone; of the rollouts
time/*                         seconds: step, wait (for the batch), train, pause, publish; pause/*: see pause_times.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from buffer.group import GROUP_TIME
from buffer.progress import ProduceProgress, TaskProgress
from buffer.staleness import staleness
from consumer.rollout_consumer import Batch


@dataclass(slots=True)
class Timing:
    """Seconds of one step."""

    wait: float = 0.0
    train: float = 0.0
    pause: float = 0.0
    publish: float = 0.0
    step: float = 0.0

    def metrics(self) -> dict[str, float]:
        parts = {
            "step": self.step,
            "wait": self.wait,
            "train": self.train,
            "pause": self.pause,
            "publish": self.publish,
        }
        return {f"time/{name}_s": seconds for name, seconds in parts.items()}


def batch_metrics(batch: Batch, advantages: NDArray[np.float32]) -> dict[str, float]:
    """Of the batch as it was taken; `advantages` float32[sum k]."""
    scores = np.concatenate([group.scores for group in batch.groups])
    lengths = np.concatenate([group.lengths for group in batch.groups])
    ages = [staleness(batch.step, e.version) for e in batch.manifest.entries if e.version is not None]
    return {
        **_spread("rewards", scores[np.isfinite(scores)]),
        "rewards/solved": float(np.mean([g.scores.max() > 0 for g in batch.groups])),
        **_spread("advantages", advantages),
        **_spread("response_len", lengths),
        "response_len/std": float(lengths.std()),
        "response_len/tokens": float(lengths.sum()),
        "prompt_len/mean": float(np.mean([len(group.prompt_ids) for group in batch.groups])),
        "staleness/mean": float(np.mean(ages)) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
        **_group_times([group.shared["extra"].get(GROUP_TIME) for group in batch.groups]),
    }


def production_metrics(before: ProduceProgress, now: ProduceProgress) -> dict[str, float]:
    """Of what was produced between two readings, and of what is left in the pools, over all tasks."""
    made = list(now.since(before).values())
    left = now.leftovers.values()
    scores = sum(task.raw_rewards_count for task in made)
    metrics = {f"async/{status}_groups": float(sum(getattr(t, status) for t in left)) for status in _POOLS}
    metrics |= {
        "async/failed_tries": _total(made, "failed"),
        "async/filtered_groups": _total(made, "filtered"),
        "async/expirations": _total(made, "expirations"),
        "async/produced_samples": _total(made, "produced_samples"),
        "async/produced_tokens": _total(made, "produced_tokens"),
    }
    return metrics | ({"raw_rewards/mean": sum(t.raw_rewards_sum for t in made) / scores} if scores else {})


_POOLS = ("completed", "aborted", "expired")


@dataclass(slots=True)
class Throughput:
    """Samples and tokens per second and GPU (`sgs`, `tgs`); a side without a GPU counts as one.

    `rollout_*` divide by the time between two readings, in which production goes on whatever the trainer does.
    """

    train_gpus: int = 1
    rollout_gpus: int = 1
    elapsed_s: float = 0.0
    samples: int = 0
    tokens: int = 0

    def metrics(self, samples: int, tokens: int, timing: Timing, produced: Mapping[str, float]) -> dict[str, float]:
        """Of a step that trained on so many samples and response tokens; adds it to the totals."""
        self.elapsed_s += timing.step
        self.samples += samples
        self.tokens += tokens
        rates = {
            "e2e_effective_sgs": self.samples / _time(self.elapsed_s, self.train_gpus),
            "e2e_effective_tgs": self.tokens / _time(self.elapsed_s, self.train_gpus),
            "effective_sgs": samples / _time(timing.step, self.train_gpus),
            "effective_tgs": tokens / _time(timing.step, self.train_gpus),
            "training_tgs": tokens / _time(timing.train, self.train_gpus),
            "rollout_sgs": produced["async/produced_samples"] / _time(timing.step, self.rollout_gpus),
            "rollout_tgs": produced["async/produced_tokens"] / _time(timing.step, self.rollout_gpus),
        }
        return {f"throughput/{name}": rate for name, rate in rates.items()}


def _time(seconds: float, gpus: int) -> float:
    return max(seconds, 1e-9) * max(gpus, 1)


def _total(tasks: list[TaskProgress], name: str) -> float:
    return float(sum(getattr(task, name) for task in tasks))


def _spread(name: str, values: NDArray[np.float32] | NDArray[np.int32]) -> dict[str, float]:
    if not len(values):
        return {}
    parts = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    return {f"{name}/{part}": float(value) for part, value in parts.items()}


def _group_times(seconds: list[float | None]) -> dict[str, float]:
    """p50 is the element at n // 2, p99 at int(0.99 n), of those groups that carry a time; nothing where none does."""
    times = sorted(s for s in seconds if s is not None)
    if not times:
        return {}
    p50, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
    metrics = {
        "task/n": float(len(times)),
        "task/mean_s": sum(times) / len(times),
        "task/p50_s": p50,
        "task/p99_s": p99,
    }
    return metrics | ({"task/p99_p50_ratio": p99 / p50} if p50 > 0 else {})
