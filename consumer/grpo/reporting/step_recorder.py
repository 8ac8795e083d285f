"""Record the steps of a trainer that does not do so itself, from the calls that it makes anyway.

    take_batch   rewards, lengths and staleness of the batch; its samples
    report       the trainer's own metrics of the step, and of evaluations

A step is written to `steps.jsonl` at the first of: its report, its commit, the take of the next
step. A later report writes it again, and what follows it. A trainer that dies between a checkpoint
and its commit has written no line: the next one writes it from the batch that the server still has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buffer.manifest import Manifest
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from consumer.config.trainer import TrainingConfig
from consumer.grpo.reporting.metric_writers import open_writers
from consumer.grpo.reporting.metrics import BatchColumns, staleness_metrics
from consumer.grpo.reporting.reporter import Reporter
from consumer.handle.step_log import Histograms, read_steps


@dataclass(slots=True)
class _Step:
    lineage: str
    gids: list[str]
    metrics: dict[str, float]
    histograms: Histograms
    began: float  # when the trainer asked for the batch
    is_written: bool = False


@contextmanager
def recorded(run: Run, config: TrainingConfig, model_dir: Path) -> Iterator[None]:
    """Record the steps of every trainer of `run` in this process within this block."""
    recorder = StepRecorder(run, config, model_dir)
    run.observers.append(recorder)
    try:
        yield
    finally:
        run.observers.remove(recorder)
        recorder.close()


class StepRecorder(Reporter):
    """Writes steps, evaluations and samples into the run's folder, and to [trainer] writers."""

    def __init__(self, run: Run, config: TrainingConfig, model_dir: Path) -> None:
        super().__init__(config, run.buffer, model_dir)
        self._run = run
        self._lock = threading.Lock()  # every thread may call the methods of a consumer
        self._steps: dict[int, _Step] = {}

    def delivered(
        self, manifest: Manifest, groups: Sequence[RolloutGroup], lineage: str, waited_s: float
    ) -> None:
        step = manifest.step
        columns = BatchColumns.of(groups, np.empty(0, np.float32))
        metrics = columns.metrics() | staleness_metrics(manifest) | {"time/wait_s": waited_s}
        if len(self._run.limits.training_tasks) > 1:
            metrics |= columns.rewards_by_task()
        with self._lock:
            if not self._steps:
                self.open(open_writers(self._config, step))
                steps = read_steps(self._config.run.folder)
                logged = steps[-1].step if steps else 0
                for before in range(max(logged, self._run.ledger.steps().freed) + 1, step):
                    if missing := self._run.ledger.manifest(before):
                        self.add_step(before, "", missing.gids, staleness_metrics(missing), {})
            self._write(step - 1)
            # trainers take ahead: these may still be reported
            self._steps = {n: kept for n, kept in self._steps.items() if step - 8 < n < step}
            began = time.monotonic() - waited_s
            self._steps[step] = _Step(lineage, manifest.gids, metrics, columns.histograms(), began)
        self.add_samples(manifest, columns, groups)

    def reported(self, step: int, metrics: Mapping[str, float], task: str) -> None:
        with self._lock:
            if task:
                self.add_evaluation(step, task, dict(metrics))
            elif known := self._steps.get(step):
                known.metrics |= metrics
                known.is_written = False
                self._write(step)

    def committed(self, step: int, began_ns: int) -> None:
        with self._lock:
            self._write(step)
        self.flush()

    def _write(self, last: int) -> None:
        """Write the steps up to `last` that are not; again those that such a line replaces."""
        replaces = False
        for number, step in sorted(self._steps.items()):
            if replaces if step.is_written else number <= last:
                step.metrics.setdefault("time/step_s", time.monotonic() - step.began)
                self.add_step(number, step.lineage, step.gids, step.metrics, step.histograms)
                step.is_written = replaces = True
