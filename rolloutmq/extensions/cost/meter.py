"""Measures in the trainer, at each train step, where tokens went and what the run has cost.

The numbers are metrics of the step, all cumulative but for `cost/step` and shares, so that a
trainer that starts again continues them from the newest line of the step log. What is spent between
two steps belongs to the later one. The time of a worker that was lost ends at its last heartbeat.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from buffer.control.events import CURRENCY
from buffer.groups.verdicts import JudgeUse, use_by_task
from buffer.ledger.tokens import TokenAccount
from buffer.manifest import Manifest
from buffer.observers import Observer
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from consumer.handle.step_log import TrainedStep, read_steps
from rolloutmq.config.config import Config
from rolloutmq.extensions.cost import CostSection

MEAN_STEPS = 20  # newest steps whose mean cost predicts the next ones
HOURS = ("worker", "worker_busy", "trainer", "trainer_wait", "judge")  # of GPUs
HOUR_MS = 3.6e6


class CostMeter(Observer):
    """`judges`: by task, the values of a judge by a language model, with its prices."""

    def __init__(
        self,
        run: Run,
        prices: CostSection,
        judges: Mapping[str, Any],
        worker_gpus: int,
        trainer_gpus: int,
        steps: Sequence[TrainedStep] = (),
    ) -> None:
        self._run, self._prices, self._judges = run, prices, judges
        self._worker_gpus, self._trainer_gpus = worker_gpus, trainer_gpus
        known = [step for step in steps if "cost/total" in step.metrics]
        last = known[-1].metrics if known else {}
        self._hours = {name: last.get(f"cost/{name}_gpu_hours", 0.0) for name in HOURS}
        self._costs = deque((step.metrics["cost/step"] for step in known), MEAN_STEPS)
        self._total = last.get("cost/total", 0.0)
        # when workers were read last
        self._read_ms = int(1000 * (steps[-1].ended_s or time.time())) if known else None
        self._sampling: dict[tuple[str, int], int] = {}
        self._trained_at = time.monotonic()

    def delivered(
        self, manifest: Manifest, groups: Sequence[RolloutGroup], lineage: str, waited_s: float
    ) -> None:
        self._hours["trainer_wait"] += waited_s / 3600 * self._trainer_gpus

    def measured(self, step: int) -> dict[str, float]:
        self._read_workers()
        now, hours = time.monotonic(), self._hours
        hours["trainer"] += (now - self._trained_at) / 3600 * self._trainer_gpus
        self._trained_at = now
        tokens = sum(self._run.account.tokens().values(), TokenAccount())
        # a taken batch is trained by now, or the next one to be
        trained = tokens.table["trained"] + tokens.table["taken"]
        before, self._total = self._total, self._price(tokens)
        self._costs.append(max(0.0, self._total - before))
        found = {f"tokens/{row}": float(number) for row, number in tokens.table.items() if number}
        found |= {f"cost/{name}_gpu_hours": spent for name, spent in hours.items()}
        found |= {
            "cost/total": self._total,
            "cost/step": self._costs[-1],
            "cost/next_100_steps": 100 * sum(self._costs) / len(self._costs),
            "cost/idle_trainer": hours["trainer_wait"] / max(hours["trainer"], 1e-12),
        }
        if self._total:
            found[CURRENCY + self._prices.currency] = 1.0
        if hours["worker"]:
            found["cost/idle_workers"] = max(0.0, 1 - hours["worker_busy"] / hours["worker"])
        if tokens.ended:
            used = tokens.table["trained"] + tokens.table["evaluated"]
            found["cost/never_trained"] = 1 - used / tokens.ended
        if trained:
            found["cost/million_trained"] = self._total / trained * 1e6
        return found

    def _read_workers(self) -> None:
        """Add the time of all workers since the last reading, or since they joined."""
        live = self._run.fleet.workers()
        now_ms = max((w.seen_ms + w.silent_ms for w in live), default=int(1000 * time.time()))
        lease_ms = self._run.limits.lease_ms
        sampling = {}
        for worker in [*live, *self._run.fleet.ended()]:
            key = (worker.id, worker.joined_ms)
            end_ms = now_ms if worker.is_live(lease_ms) else worker.seen_ms
            alive_ms = max(0, end_ms - max(worker.joined_ms, self._read_ms or 0))
            busy_ms = worker.sampling_ms - self._sampling.get(key, 0)
            sampling[key] = worker.sampling_ms
            self._hours["worker"] += alive_ms / HOUR_MS * self._worker_gpus
            self._hours["worker_busy"] += min(busy_ms, alive_ms) / HOUR_MS * self._worker_gpus
        if self._read_ms is not None and self._prices.judge_gpu_hour:
            paid_ms = max(0, now_ms - self._read_ms)
            self._hours["judge"] += paid_ms / HOUR_MS * self._prices.judge_gpus
        self._sampling, self._read_ms = sampling, now_ms

    def _price(self, tokens: TokenAccount) -> float:
        prices, used = self._prices, judge_use(self._run)
        total = self._hours["worker"] * prices.worker_gpu_hour
        total += self._hours["trainer"] * prices.trainer_gpu_hour
        total += self._hours["judge"] * prices.judge_gpu_hour
        millions = tokens.total * prices.million_sampled_tokens
        millions += tokens.prompt * prices.million_prompt_tokens
        for task, judge in self._judges.items():
            use = used.get(task, JudgeUse())
            millions += use.prompt_tokens * judge.million_prompt_tokens
            millions += use.completion_tokens * judge.million_completion_tokens
        return float(total + millions / 1e6)


def judge_use(run: Run) -> dict[str, JudgeUse]:
    """Return what the judges of each task have used, of kinds that count it."""
    return use_by_task(run.store.ask("judge_use", "HGETALL", run.keys.judge_use))


def observe(run: Run, process: str, config: Config) -> None:
    if process != "trainer":
        return
    prices: CostSection = config.attached.get("cost", CostSection())
    found = {name: task.attached.get("llm") for name, task in config.tasks.items()}
    judges = {name: judge for name, judge in found.items() if judge}
    per_worker = prices.worker_gpus or max(1, config.worker_gpus // max(1, config.launch.workers))
    ranks = config.launch.ranks(has_own_loop=bool(config.trainer.loop))
    steps = read_steps(config.run.folder)
    run.observers.append(CostMeter(run, prices, judges, per_worker, ranks, steps))
