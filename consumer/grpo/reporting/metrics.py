"""The metrics of one train step except the learner's; consumer/README.md lists them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.control.events import REWARD_OF_TASK
from buffer.control.progress import ProduceProgress
from buffer.ids import split_group_id
from buffer.manifest import Manifest
from buffer.wire.group import GROUP_TIME, RolloutGroup, new_contexts
from buffer.wire.staleness import staleness
from consumer.grpo.learner.group_rewards import FULL_SCORE
from consumer.grpo.reporting.answers import Answer, answers_of, learning_metrics, reward_parts
from consumer.handle.histogram import StepHistogram

POOLS = ("completed", "aborted", "expired")


@dataclass(slots=True)
class Timing:
    wait: float = 0.0
    read: float = 0.0
    train: float = 0.0
    pause: float = 0.0
    publish: float = 0.0
    step: float = 0.0

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": seconds for name, seconds in asdict(self).items()}


@dataclass(slots=True)
class BatchColumns:
    """What the metrics of a batch need of its groups: of one rank, or of all."""

    scores: list[float]  # of the rollouts that have one, of trained roles
    unscored: list[int]  # rollouts of each group that have none, of trained roles
    tasks: list[str]  # the task of each score
    roles: list[tuple[str, float | None]]  # task/role and score of the rollouts that have a role
    lengths: list[int]  # response tokens of each rollout
    sizes: list[int]  # rollouts of each group
    solved: list[bool]  # whether a rollout of the group has the full score
    prompts: list[int]  # prompt tokens of each group
    seconds: list[float]  # that workers spent on each group, if known
    advantages: list[float]
    gids: list[str]
    means: list[float]  # mean score of each group; a missing score counts as 0
    truncated: list[int]  # responses of each group that reached their token limit
    contexts: list[dict[str, int]]  # that agents of each group began anew, by reason
    fates: list[str]  # of each rollout, see `TrainController.fates`; [] where they are unknown
    answers: list[Sequence[Answer]]  # of each group
    parts: list[dict[str, float]]  # means of each group's rewards beside the score

    @classmethod
    def of(
        cls,
        groups: Sequence[RolloutGroup],
        advantages: NDArray[np.float32],
        fates: Sequence[str] = (),
    ) -> BatchColumns:
        trained = [group.scores[group.in_training] for group in groups]
        scored = [
            (group.task, score)
            for group, scores in zip(groups, trained, strict=True)
            for score in scores.tolist()
            if math.isfinite(score)
        ]
        times = [group.shared.extra.get(GROUP_TIME) for group in groups]
        return cls(
            scores=[score for _, score in scored],
            unscored=[int((~np.isfinite(scores)).sum()) for scores in trained],
            tasks=[task for task, _ in scored],
            roles=[
                (f"{group.task}/{role}", score if math.isfinite(score) else None)
                for group in groups
                for role, score in zip(group.roles, group.scores.tolist(), strict=True)
                if role
            ],
            lengths=[n for group in groups for n in group.lengths.tolist()],
            sizes=[len(group.lengths) for group in groups],
            solved=[bool(scores.max() >= FULL_SCORE) for scores in trained],
            prompts=[len(group.prompt_ids) for group in groups],
            seconds=[time for time in times if time is not None],
            advantages=advantages.tolist(),
            gids=[group.gid for group in groups],
            means=[float(np.nan_to_num(scores).mean()) for scores in trained],
            truncated=[int(group.truncated.sum()) for group in groups],
            contexts=[new_contexts(group.shared.extra) for group in groups],
            fates=[*fates],
            answers=[answers_of(group) for group in groups],
            parts=[reward_parts(group) for group in groups],
        )

    def lists(self) -> dict[str, list[Any]]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def join(cls, parts: Sequence[dict[str, list[Any]]]) -> BatchColumns:
        """Return the columns of all ranks, from their `lists`."""
        return cls(**{name: [v for part in parts for v in part[name]] for name in parts[0]})

    def lengths_by_fate(self) -> Mapping[tuple[str, str], list[int]]:
        """Return the lengths of responses by task and fate."""
        found: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        responses = zip(self.lengths, self.fates, strict=True)
        for gid, size in zip(self.gids, self.sizes, strict=True):
            for length, fate in islice(responses, size):
                if fate:
                    found[split_group_id(gid)[0], fate].append(length)
        return found

    def missing_roles(self, trained: Mapping[str, Collection[str]]) -> Iterator[str]:
        """Yield which names of `trained`, the roles of each task, no rollout of the batch has."""
        for task in sorted(trained.keys() & {split_group_id(gid)[0] for gid in self.gids}):
            named = (name.partition("/") for name, _ in self.roles)
            roles = {role for own, _, role in named if own == task}
            if missing := sorted(set(trained[task]) - roles - {""}):
                yield (
                    f"no rollout of task {task} has the role {', '.join(missing)} of its "
                    f"train_roles: the agent's roles are {', '.join(sorted(roles)) or 'none'}, and "
                    "those that train_roles does not name are not trained"
                )

    def rewards_by_task(self) -> dict[str, float]:
        return _means_by_name(zip(self.tasks, self.scores, strict=True))

    def contexts_by_task(self) -> dict[str, float]:
        counts: defaultdict[str, float] = defaultdict(float)  # JSON has no sum of large integers
        for gid, contexts in zip(self.gids, self.contexts, strict=True):
            for why, count in contexts.items():
                counts[f"new_contexts/{split_group_id(gid)[0]}/{why}"] += count
        return counts

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def histograms(self) -> dict[str, StepHistogram]:
        """Return the histograms of scores, and of response tokens."""
        found = {
            "rewards": StepHistogram.of(self.scores),
            "response_len": StepHistogram.of(self.lengths, finest=1.0),
        }
        return {name: histogram for name, histogram in found.items() if histogram}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the batch, except its staleness."""
        metrics = {
            **_spread("rewards", self.scores),
            **_spread("advantages", self.advantages),
            **_spread("response_len", self.lengths),
            "response_len/tokens": float(self.tokens),
            **_group_times(self.seconds),
            **_means_by_name((name, score) for name, score in self.roles if score is not None),
            **self.contexts_by_task(),
            **learning_metrics(self.gids, self.answers, self.parts),
        }
        if self.lengths:
            metrics |= {
                "rewards/unscored": float(sum(self.unscored)),
                "rewards/solved": float(np.mean(self.solved)),
                "prompt_len/mean": float(np.mean(self.prompts)),
            }
        return metrics


def _means_by_name(scored: Iterable[tuple[str, float]]) -> dict[str, float]:
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for name, score in scored:
        scores[name].append(score)
    return {f"{REWARD_OF_TASK}{name}": float(np.mean(own)) for name, own in scores.items()}


def staleness_metrics(manifest: Manifest) -> dict[str, float]:
    versions = [entry.version for entry in manifest.entries if entry.version is not None]
    ages = [staleness(manifest.step, version) for version in versions]
    return {
        "staleness/mean": float(np.mean(ages)) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
    }


def production_metrics(before: ProduceProgress, now: ProduceProgress) -> dict[str, float]:
    """Return what was produced between two readings, and what the pools hold, over all tasks."""
    since = now.since(before)
    leftovers = now.leftovers.values()

    def total(name: str) -> float:
        return float(sum(getattr(task, name) for task in since.values()))

    metrics = {
        f"async/{status}_groups": float(sum(getattr(task, status) for task in leftovers))
        for status in POOLS
    }
    metrics |= {
        "async/failed_tries": total("failed"),
        "async/filtered_groups": total("filtered"),
        "async/skipped_groups": total("skipped"),
        **{
            f"async/{name}": total(name)
            for name in ("expirations", "ended_early", "discarded_tokens", "produced_samples")
        },
        "async/produced_tokens": total("produced_tokens"),
    }
    if scores := total("raw_rewards_count"):
        metrics["raw_rewards/mean"] = total("raw_rewards_sum") / scores
    for name, task in since.items():
        dead, ever = max(0, task.dead), now.tasks[name]  # `rolloutmq requeue` lowers it
        shares = {
            "expired": (task.expirations, task.consumed + task.expirations, True),
            "unparsed": (task.unparsed, task.raw_rewards_count, ever.unparsed),
            "truncated": (task.truncated, task.raw_rewards_count, ever.truncated),
            "filtered_groups": (task.filtered, task.produced_groups, ever.filtered),
            "failed": (dead, task.produced_groups + dead, ever.dead),
        }
        metrics |= {
            f"{share}/{name}": number / total
            for share, (number, total, is_shown) in shares.items()
            if total and is_shown
        }
    return metrics


@dataclass(slots=True)
class Throughput:
    """Computes samples (`sgs`) and tokens (`tgs`) per second and GPU; no GPU counts as one.

    `rollout_*` divide by the time between two readings, as production never stops.
    """

    train_gpus: int = 1
    rollout_gpus: int = 1
    elapsed_s: float = 0.0
    samples: int = 0
    tokens: int = 0

    def metrics(
        self, samples: int, tokens: int, timing: Timing, produced: Mapping[str, float]
    ) -> dict[str, float]:
        self.elapsed_s += timing.step
        self.samples += samples
        self.tokens += tokens
        total_s = _gpu_seconds(self.elapsed_s, self.train_gpus)
        step_s = _gpu_seconds(timing.step, self.train_gpus)
        rollout_s = _gpu_seconds(timing.step, self.rollout_gpus)
        return {
            "throughput/e2e_effective_sgs": self.samples / total_s,
            "throughput/e2e_effective_tgs": self.tokens / total_s,
            "throughput/effective_sgs": samples / step_s,
            "throughput/effective_tgs": tokens / step_s,
            "throughput/training_tgs": tokens / _gpu_seconds(timing.train, self.train_gpus),
            "throughput/rollout_sgs": produced["async/produced_samples"] / rollout_s,
            "throughput/rollout_tgs": produced["async/produced_tokens"] / rollout_s,
        }


def _gpu_seconds(seconds: float, gpus: int) -> float:
    return max(seconds, 1e-9) * max(gpus, 1)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/min": float(min(values)),
        f"{name}/max": float(max(values)),
        f"{name}/std": float(np.std(values)),
    }


def _group_times(seconds: list[float]) -> dict[str, float]:
    """Return mean, p50 (element n // 2) and p99 (int(0.99 n)) of the groups that have a time."""
    times = sorted(seconds)
    if not times:
        return {}
    p50 = times[len(times) // 2]
    p99 = times[int(0.99 * len(times))]
    metrics = {
        "task/n": float(len(times)),
        "task/mean_s": sum(times) / len(times),
        "task/p50_s": p50,
        "task/p99_s": p99,
    }
    if p50 > 0:
        metrics["task/p99_p50_ratio"] = p99 / p50
    return metrics
