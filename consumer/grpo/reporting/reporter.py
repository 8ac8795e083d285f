"""Pass metrics, evaluations and samples to their destinations, in a thread of its own.

No destination delays or ends a run: what one raises is logged, and it gets the next report.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from buffer.errors import RolloutMQError
from buffer.manifest import Manifest, ManifestEntry
from buffer.redis.connection.retry import LogOnce
from buffer.replay_buffer import ReplayBuffer
from buffer.wire.group import RolloutGroup
from buffer.wire.staleness import staleness
from consumer.config.training import TrainingConfig
from consumer.grpo.reporting.metric_writers import MetricWriter, choose
from consumer.grpo.reporting.metrics import BatchColumns
from consumer.grpo.reporting.sample_log import Sample, TokenTexts, describe_sample

log = logging.getLogger("rolloutmq.trainer")

MOST_WAITING = 16  # reports in the queue above which samples, but never metrics, are left out

FLUSH_S = 30.0  # a checkpoint, and the end of the trainer, wait this long


@dataclass(frozen=True, slots=True)
class ChosenGroup:
    """A group whose texts are logged, and why; `group` is None where another rank has it."""

    why: str
    group: RolloutGroup | None
    entry: ManifestEntry


def choose_groups(
    config: TrainingConfig, columns: BatchColumns, groups: Sequence[RolloutGroup], batch: Manifest
) -> list[ChosenGroup]:
    """Choose the groups of a batch whose texts are logged; `groups` are those that are here."""
    scores = dict(zip(columns.gids, columns.means, strict=True))
    truncated = dict(zip(columns.gids, columns.truncated, strict=True))
    count = config.samples.groups_per_step
    chosen = choose(scores, truncated, count, config.run.seed, batch.step)
    own = {group.gid: group for group in groups}
    entries = {entry.gid: entry for entry in batch.entries}
    return [ChosenGroup(why, own.get(gid), entries[gid]) for gid, why in chosen.items()]


class Reporter:
    """Owns the destinations: only its thread calls them after `open`."""

    def __init__(self, buffer: ReplayBuffer, texts: TokenTexts) -> None:
        self._buffer = buffer
        self._texts = texts
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

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put(lambda writer: writer.write(step, metrics))

    def add_evaluation(self, step: int, task: str, metrics: Mapping[str, float]) -> None:
        self._put(lambda writer: writer.write_evaluation(step, task, metrics))

    def add_samples(self, step: int, chosen: Sequence[ChosenGroup]) -> None:
        """Report the texts of these groups, unless the destinations are far behind."""
        is_behind = self._queue.qsize() > MOST_WAITING
        self._behind.report("their destinations are slower than the train steps" * is_behind)
        if chosen and not is_behind:
            self._queue.put(lambda: self._pass_samples(step, chosen))

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

    def _pass_samples(self, step: int, chosen: Sequence[ChosenGroup]) -> None:
        try:
            samples = [self._describe(step, each) for each in chosen]
        except RolloutMQError as error:
            log.warning("the samples of step %s are not logged: %s", step, error)
            return
        self._pass(lambda writer: writer.write_samples(step, samples))

    def _describe(self, step: int, chosen: ChosenGroup) -> Sample:
        group = chosen.group or self._buffer.read(chosen.entry.payload)
        version = chosen.entry.version
        age = None if version is None else staleness(step, version)
        return describe_sample(group, step, chosen.why, age, self._texts)
