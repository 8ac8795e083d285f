"""What `[retention] policy = "archive"` costs: take and commit of batches, with it and without.

Processor time is that of the server and of the client, with the thread that archives; the clock
stops when the last file is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks import sample
from benchmarks.bench_run import TASK, BenchRun
from benchmarks.figure import Figure, Way, interleave
from benchmarks.sample import Shape
from benchmarks.server import BenchServer
from buffer.wire import group_bytes
from consumer.handle.rollout_consumer import RolloutConsumer
from rolloutmq.extensions.records.archive import Archiver

SIZES = {"166 KB": sample.FULL, "2.6 MB": Shape(8, 512, 32_768)}
STEPS = 3
ON, OFF = "with an archive", "without"


class Trainer(NamedTuple):
    """A trainer that needs no time for its steps."""

    consumer: RolloutConsumer
    archiver: Archiver | None

    @classmethod
    def ready(cls, server: BenchServer, folder: Path | None, groups: int, shape: Shape) -> Trainer:
        """Return one whose batches are ready; `folder`: of the archive."""
        run = BenchRun(server, archive=str(folder or ""), retain_until_exported=folder is not None)
        run.make_ready(STEPS * groups, shape)
        archiver = Archiver(run.run, {}, folder / "terms") if folder else None
        run.run.observers += [archiver] if archiver else []
        return cls(RolloutConsumer(run.run, prefetch_bytes=0, nonce=run.trainer), archiver)

    def train(self, groups: int) -> None:
        for step in range(1, STEPS + 1):
            self.consumer.take_batch(step, {TASK: groups})
            self.consumer.commit(step, keep=step)
        if self.archiver:
            self.archiver.closed()


def archive(server: BenchServer, groups: Sequence[int], rounds: int) -> Iterator[Figure]:
    """Measure batches of so many groups, one number for each of `SIZES`."""
    for (size, shape), count in zip(SIZES.items(), groups, strict=True):
        section = f"archive, {count} groups of {size}"
        with TemporaryDirectory() as place:
            folder, written = Path(place, "archive"), [0]

            def clean(folder: Path = folder, written: list[int] = written) -> None:
                server.clear()
                written.append(sum(file.stat().st_size for file in folder.glob("*.rmq")))
                shutil.rmtree(folder, ignore_errors=True)

            def train(trainer: Trainer, count: int = count) -> None:
                trainer.train(count)

            made = partial(Trainer.ready, server, groups=count, shape=shape)
            ways = {
                name: Way(train, partial(made, kept), clean)
                for name, kept in {OFF: None, ON: folder}.items()
            }
            spent = interleave(ways, rounds, server.processor_time)
            payload = len(group_bytes.encode(sample.group(f"{TASK}-{0:010d}", shape)))
            mb = STEPS * count * payload / 1e6
            for name in ways:
                yield Figure(section, name, median(spent.wall[name]) / STEPS, "s/step")
                yield Figure(
                    section, f"{name}: processor", median(spent.cpu[name]) / STEPS, "s/step"
                )
            more = median(b - a for a, b in zip(spent.cpu[OFF], spent.cpu[ON], strict=True))
            yield Figure(section, "processor for a MB", 1000 * more / mb, "ms")
            yield Figure(section, "file / payloads", max(written) / 1e6 / mb, "x")
