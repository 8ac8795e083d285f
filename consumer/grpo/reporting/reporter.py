"""Write metrics, evaluations and samples: to the run's log at once, elsewhere in a thread.

No destination but the log delays or ends a run: what one raises is logged, and it gets the next
report.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

from buffer.control.host_watch import HostWatch
from buffer.errors import RolloutMQError
from buffer.groups.replay_buffer import ReplayBuffer
from buffer.manifest import Manifest
from buffer.observers import Observer
from buffer.redis.retry import LogOnce
from buffer.wire.group import RolloutGroup
from buffer.wire.staleness import staleness
from consumer.config.trainer import TrainingConfig
from consumer.grpo.reporting.metric_writers import MetricWriter, choose
from consumer.grpo.reporting.metrics import BatchColumns
from consumer.handle.sample_log import Sample, TokenTexts, describe_sample
from consumer.handle.sample_tokens import Packed
from consumer.handle.step_log import Histograms, StepWriter
from consumer.learning.findings import LearningLog

log = logging.getLogger("rolloutmq.trainer")

MOST_WAITING = 16  # reports in the queue above which samples, but never metrics, are left out

FLUSH_S = 30.0  # a checkpoint, and the end of the trainer, wait this long


class Reporter(Observer):
    """Passes what a trainer reports to the destinations, which only its thread calls after `open`.

    It observes one trainer: a step's line names the groups that were delivered for it.
    """

    def __init__(self, config: TrainingConfig, buffer: ReplayBuffer, model_dir: Path) -> None:
        self._config = config
        self._buffer = buffer
        self._texts = TokenTexts([model_dir])
        self._log = StepWriter(config.run.folder, config.trainer.silence)
        self._learning = LearningLog(config.run.folder, config.trainer.silence)
        self._host = HostWatch(config.run.folder)
        self._lineage, self._gids = "", list[str]()  # of the newest batch
        self.histograms: Histograms = {}  # of the step that is reported next
        self._destinations: list[tuple[MetricWriter, LogOnce]] = []
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._behind = LogOnce(log, "samples are left out")
        self._thread = threading.Thread(target=self._work, name="reporter", daemon=True)

    def open(self, destinations: Sequence[MetricWriter]) -> None:
        self._destinations = [
            (writer, LogOnce(log, f"{type(writer).__name__} failed", ended="it works again"))
            for writer in destinations
        ]
        self._thread.start()

    def delivered(
        self, manifest: Manifest, groups: Sequence[RolloutGroup], lineage: str, waited_s: float
    ) -> None:
        self._lineage, self._gids = lineage, manifest.gids

    def reported(self, step: int, metrics: Mapping[str, float], task: str) -> None:
        if task:
            self.add_evaluation(step, task, dict(metrics))
        else:
            self.add_step(step, self._lineage, self._gids, dict(metrics), self.histograms)

    def add_step(
        self,
        step: int,
        lineage: str,
        gids: list[str],
        metrics: dict[str, float],
        histograms: Histograms,
    ) -> None:
        """Report a step, which is in the log when this returns. Raises OSError."""
        metrics = metrics | {f"system/{name}": float(n) for name, n in self._host.numbers().items()}
        self._log.add_step(step, lineage, gids, metrics, histograms)
        self._learning.add_step(step, gids, metrics)
        self._put(lambda writer: writer.write(step, metrics))

    def add_evaluation(self, step: int, task: str, metrics: dict[str, float]) -> None:
        """Report an evaluation, which is in the log when this returns. Raises OSError."""
        self._log.add_evaluation(step, task, metrics)
        self._learning.add_evaluation(step, task, metrics)
        self._put(lambda writer: writer.write_evaluation(step, task, metrics))

    def add_samples(
        self,
        batch: Manifest,
        columns: BatchColumns,
        groups: Sequence[RolloutGroup],
        scores: Mapping[str, Sequence[Packed]] = MappingProxyType({}),
    ) -> None:
        """Report the texts of some groups of a batch, unless the destinations are far behind.

        `columns`: of the whole batch. Groups that are not in `groups` are read from the server.
        `scores`: the trainer's numbers by token, of each rollout of these groups.
        """
        count = self._config.samples.groups_per_step
        chosen = choose(columns, count, self._config.run.seed, batch.step)
        own = {group.gid: group for group in groups if group.gid in chosen}
        is_behind = self._queue.qsize() > MOST_WAITING
        self._behind.report("their destinations are slower than the train steps" * is_behind)
        if chosen and not is_behind:
            self._queue.put(lambda: self._pass_samples(batch, chosen, own, scores))

    def flush(self) -> bool:
        """Wait until all is reported, `FLUSH_S` at most; return whether it is."""
        done = threading.Event()
        self._queue.put(done.set)
        is_done = not self._thread.is_alive() or done.wait(FLUSH_S)
        if not is_done:
            log.warning("metrics and samples are not written after %s s", FLUSH_S)
        return is_done

    def close(self) -> None:
        if self._thread.is_alive() and self.flush():
            self._put(lambda writer: writer.close())
            self._queue.put(None)
            self._thread.join()

    def _put(self, report: Callable[[MetricWriter], None]) -> None:
        self._queue.put(lambda: self._pass(report))

    def _work(self) -> None:
        while job := self._queue.get():
            job()

    def _pass(self, report: Callable[[MetricWriter], None]) -> None:
        for writer, state in self._destinations:
            try:
                report(writer)
            except Exception as error:  # what a package or a disk raises must not end the run
                state.report(type(error).__name__, f"{type(error).__name__}: {error}")
            else:
                state.report("")

    def _pass_samples(
        self,
        batch: Manifest,
        chosen: Mapping[str, str],
        own: Mapping[str, RolloutGroup],
        scores: Mapping[str, Sequence[Packed]],
    ) -> None:
        entries = {entry.gid: entry for entry in batch.entries}
        samples: list[Sample] = []
        try:
            for gid, why in chosen.items():
                version = entries[gid].version
                group = own.get(gid) or self._buffer.read(entries[gid].payload)
                age = None if version is None else staleness(batch.step, version)
                line = describe_sample(
                    group, batch.step, why, age, self._texts,
                    tokens=self._config.samples.tokens_per_rollout, scores=scores.get(gid, ()),
                )  # fmt: skip
                samples.append(line)
        except RolloutMQError as error:
            log.warning("the samples of step %s are not logged: %s", batch.step, error)
            return
        self._pass(lambda writer: writer.write_samples(batch.step, samples))
