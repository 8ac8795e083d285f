"""Measures in the trainer, at each train step, where tokens went and what the run has cost.

The numbers are metrics of the step, all cumulative but for `cost/step` and shares, so that a
trainer that starts again continues them from the newest line of the step log. What is spent between
two steps belongs to the later one. The time of a worker that was lost ends at its last heartbeat.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from buffer.control.events import CURRENCY
from buffer.groups.verdicts import JudgeUse, use_by_task
from buffer.ledger.tokens import USED, TokenAccount
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
    def __init__(self, run: Run, prices: CostSection, worker_gpus: int, trainer_gpus: int) -> None:
        self._run = run
        self._prices = prices
        self._worker_gpus = worker_gpus
        self._trainer_gpus = trainer_gpus
        self._hours = dict.fromkeys(HOURS, 0.0)
        self._costs = deque[float](maxlen=MEAN_STEPS)
        self._total = 0.0
        self._read_ms: int | None = None  # when workers were read last
        self._sampling: dict[tuple[str, int], int] = {}
        self._trained_at = time.monotonic()

    def continue_from(self, steps: Sequence[TrainedStep]) -> None:
        """Continue the sums in the metrics of earlier steps."""
        known = [step.metrics for step in steps if "cost/total" in step.metrics]
        if known:
            self._hours = {n: known[-1].get(f"cost/{n}_gpu_hours", 0.0) for n in HOURS}
            self._costs.extend(metrics["cost/step"] for metrics in known[-MEAN_STEPS:])
            self._total = known[-1]["cost/total"]
            self._read_ms = int(1000 * (steps[-1].ended_s or time.time()))

    def delivered(
        self, manifest: Manifest, groups: Sequence[RolloutGroup], lineage: str, waited_s: float
    ) -> None:
        self._hours["trainer_wait"] += waited_s / 3600 * self._trainer_gpus

    def measured(self, step: int) -> dict[str, float]:
        self._read_workers()
        now = time.monotonic()
        self._hours["trainer"] += (now - self._trained_at) / 3600 * self._trainer_gpus
        self._trained_at = now
        tokens = TokenAccount.of_all([*self._run.account.tokens().values()])
        judges = sum(judge_use(self._run).values(), JudgeUse())
        before, self._total = self._total, self._price(tokens, judges)
        self._costs.append(max(0.0, self._total - before))
        hours, trained = self._hours, tokens.rows["trained"]
        unused = tokens.ended - sum(tokens.rows[row] for row in USED)
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
        if judges.prompt_tokens:
            found["cost/judge_prompt_tokens"] = judges.prompt_tokens
            found["cost/judge_completion_tokens"] = judges.completion_tokens
        if hours["worker"]:
            found["cost/idle_workers"] = max(0.0, 1 - hours["worker_busy"] / hours["worker"])
        if tokens.ended:
            found["cost/never_trained"] = unused / tokens.ended
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
        if self._read_ms is not None:
            paid_ms = max(0, now_ms - self._read_ms)
            self._hours["judge"] += paid_ms / HOUR_MS * self._prices.judge_gpus
        self._sampling, self._read_ms = sampling, now_ms

    def _price(self, tokens: TokenAccount, judges: JudgeUse) -> float:
        prices, hours = self._prices, self._hours
        return (
            hours["worker"] * prices.worker_gpu_hour
            + hours["trainer"] * prices.trainer_gpu_hour
            + hours["judge"] * prices.judge_gpu_hour
            + tokens.total / 1e6 * prices.million_sampled_tokens
            + tokens.prompt / 1e6 * prices.million_prompt_tokens
            + judges.prompt_tokens / 1e6 * prices.million_judge_prompt_tokens
            + judges.completion_tokens / 1e6 * prices.million_judge_completion_tokens
        )


def judge_use(run: Run) -> dict[str, JudgeUse]:
    """Return what the judges of each task have used, of kinds that count it."""
    return use_by_task(run.store.ask("judge_use", "HGETALL", run.keys.judge_use))


def observe(run: Run, process: str, config: Config) -> None:
    if process != "trainer":
        return
    prices: CostSection = config.attached.get("cost", CostSection())
    workers = max(1, config.launch.workers)
    per_worker = prices.worker_gpus or max(1, config.worker_gpus // workers)
    ranks = config.launch.ranks(has_own_loop=bool(config.trainer.loop))
    meter = CostMeter(run, prices, per_worker, ranks)
    meter.continue_from(read_steps(config.run.folder))
    run.observers.append(meter)
