"""Where the trainer reports: the sample log, a progress bar, and the writers that are attached."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import ClassVar

import orjson
from isal import igzip
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from buffer.imports import attached, load_object
from consumer.config.trainer import METRIC_WRITERS, TrainingConfig
from consumer.grpo.reporting.metrics import BatchColumns
from consumer.handle.sample_log import Sample, SampleFile, sample_files

STEPS_PER_FILE = 100
FILES = 16  # a file has at most this part of `max_bytes`, so little is deleted at once


class MetricWriter:
    """A destination of reports, some of which come again after a restart.

    An entry point of the group METRIC_WRITERS names a class of this kind that `[trainer] writers`
    may name. It is called with the config and the step at which it begins, and raises ConfigError.
    """

    package: ClassVar[str]
    """what it imports beside this project's own packages; of those that a config names"""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def write_evaluation(self, step: int, task: str, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one held-out task, `eval/*`, for the weights after a step."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the samples of one step (`consumer.handle.sample_log`)."""

    def close(self) -> None: ...


def open_writers(config: TrainingConfig, first: int) -> list[MetricWriter]:
    """Open [trainer] writers and the sample log at step `first`.

    Raises ConfigError where a package is not installed.
    """
    writers: list[MetricWriter] = [
        load_object(attached(METRIC_WRITERS)[name], kind="metric writer")(config, first)
        for name in config.trainer.writers
    ]
    if config.samples.groups_per_step:
        writers.append(SampleWriter(config.run.folder, config.samples.max_size, first))
    return writers


class ProgressBar(MetricWriter):
    def __init__(self, done: int, steps: int) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, reward="-")
        self._bar.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        reward = metrics.get("rewards/mean")
        text = "-" if reward is None else f"{reward:.3f}"
        self._bar.update(self._task, completed=step, reward=text)

    def close(self) -> None:
        self._bar.stop()


def choose(columns: BatchColumns, count: int, seed: int, step: int) -> dict[str, str]:
    """Return which groups of a batch are logged, and why: best, worst, truncated or random, by gid.

    Of groups with equal mean scores, the first is best and the last is worst. The group with the
    most truncated responses is chosen. A step that is trained again logs the same groups.
    """
    gids = columns.gids
    scores = dict(zip(gids, columns.means, strict=True))
    truncated = dict(zip(gids, columns.truncated, strict=True))
    best = sorted(gids, key=lambda gid: -scores[gid])
    longest = sorted(filter(truncated.get, gids), key=lambda gid: -truncated[gid])
    ranked = (("best", best), ("worst", best[::-1]), ("truncated", longest))
    chosen: dict[str, str] = {}
    for why, order in ranked[:count]:
        if gid := next((gid for gid in order if gid not in chosen), ""):
            chosen[gid] = why
    others = [gid for gid in gids if gid not in chosen]
    drawn = random.Random(f"{seed} {step}").sample(others, min(count - len(chosen), len(others)))
    return chosen | dict.fromkeys(drawn, "random")


class SampleWriter(MetricWriter):
    """Appends samples to files of the log that this writer creates.

    Replaces the log from step `first` on. Above `max_bytes`, the oldest files are deleted.
    """

    def __init__(self, run_dir: Path, max_bytes: int, first: int) -> None:
        self._run_dir = run_dir
        self._max_bytes = max_bytes
        self._file: FileIO | None = None
        self._next = first
        self._steps = 0

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append one step, whole or not at all. Raises OSError."""
        lines = b"".join(orjson.dumps(sample) + b"\n" for sample in samples)
        data = igzip.compress(lines, compresslevel=1)  # higher: 5 % less for twice the time
        file = self._file or self._create()
        self._file = None
        start = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))
        except OSError:
            # half a member would hide those after it; if this fails, a new file follows
            file.truncate(start)
            file.seek(start)
            self._file = file
            raise
        self._next = step + 1
        self._steps += 1
        if self._steps < STEPS_PER_FILE and file.tell() < self._max_bytes // FILES:
            self._file = file
        else:
            file.close()

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _create(self) -> FileIO:
        """Delete the oldest files above the limit, and create the next one."""
        files = sample_files(self._run_dir)
        sizes = [file.path.stat().st_size for file in files]
        # room for the next file
        excess = sum(sizes) + self._max_bytes // FILES - self._max_bytes
        for file, size in zip(files, sizes, strict=True):
            if excess > 0:
                file.path.unlink()
                excess -= size
        new = SampleFile.named(self._run_dir, files[-1].number + 1 if files else 1, self._next)
        new.path.parent.mkdir(exist_ok=True)
        self._steps = 0
        return new.path.open("xb", buffering=0)
