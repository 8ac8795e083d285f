"""Choose some groups of each train step, and append them to the sample log (sample_log.py)."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

import orjson
from isal import igzip

from consumer.grpo.reporting.metric_writers import MetricWriter
from consumer.grpo.reporting.sample_log import Sample, SampleFile, sample_files

STEPS_PER_FILE = 100
FILES = 16  # a file has at most this part of `max_bytes`, so little is deleted at once

_FAST = 1  # higher levels save 5 % and cost twice the time


def choose(scores: Mapping[str, float], count: int, seed: int, step: int) -> dict[str, str]:
    """Return which groups of a step are logged, and why: gid to best, worst or random.

    `scores`: each group's mean. A step that is trained again logs the same groups. Of equal scores,
    the first is best and the last is worst.
    """
    gids = list(scores)
    best = sorted(gids, key=lambda gid: -scores[gid])
    chosen = {gid: "best" for gid in best[: min(count, 1)]}
    if count > 1:
        chosen |= {gid: "worst" for gid in best[1:][-1:]}
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
        file = self._file or self._create()
        self._file = None
        start = file.tell()
        try:
            _write(file, igzip.compress(lines, compresslevel=_FAST))
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
        files = sample_files(self._run_dir)
        self._delete_oldest(files)
        new = SampleFile.named(self._run_dir, files[-1].number + 1 if files else 1, self._next)
        new.path.parent.mkdir(exist_ok=True)
        self._steps = 0
        return new.path.open("xb", buffering=0)

    def _delete_oldest(self, files: Sequence[SampleFile]) -> None:
        sizes = [file.path.stat().st_size for file in files]
        # room for the next file
        excess = sum(sizes) + self._max_bytes // FILES - self._max_bytes
        for file, size in zip(files, sizes, strict=True):
            if excess <= 0:
                return
            file.path.unlink()
            excess -= size


def _write(file: FileIO, data: bytes) -> None:
    if file.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))
