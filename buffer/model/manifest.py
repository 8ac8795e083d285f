"""The record of one batch: what a train step was given, in order (I5); or why there is none yet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buffer.model.ids import split_group_id
from buffer.model.job import PayloadRef


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One group of a batch."""

    payload: PayloadRef
    samples: int
    version: int | None

    @property
    def gid(self) -> str:
        return self.payload.gid

    @property
    def line(self) -> str:
        """As the server keeps it."""
        ref = self.payload
        version = "-" if self.version is None else self.version
        return f"{ref.gid} {ref.token} {ref.chunks} {ref.size} {ref.crc or '-'} {self.samples} {version}"

    @classmethod
    def parse(cls, line: str) -> ManifestEntry:
        gid, token, chunks, size, crc, samples, version = line.split(" ")
        ref = PayloadRef(gid, token, int(chunks), int(size), "" if crc == "-" else crc)
        return cls(ref, int(samples), None if version == "-" else int(version))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What step T was given: its groups, in order, and what was asked for."""

    step: int
    header: str
    entries: tuple[ManifestEntry, ...]

    @property
    def revision(self) -> int:
        """How many groups were quarantined out of it since it was taken."""
        found = re.search(r" revision=(\d+)", self.header)
        return int(found[1]) if found else 0

    @property
    def open_places(self) -> Counter[str]:
        """Places of each task that a quarantined group left, and that nobody has filled."""
        found = re.search(r" quarantined=(\S+)", self.header)
        notes = found[1].split(",") if found else []
        return Counter(
            split_group_id(note.partition(":")[0])[0] for note in notes if note.endswith(":-")
        )

    @property
    def token_threshold(self) -> int | None:
        """Staleness from which a single token is not trained; None: all are."""
        found = re.search(r" tokens=(\d+)", self.header)
        return int(found[1]) if found else None

    @property
    def forks(self) -> list[tuple[str, int]]:
        """The newest lineages of weights when the batch was taken, and their first steps; known
        where tokens expire.
        """
        found = re.search(r" forks=(\S+)", self.header)
        pairs = [fork.rpartition(":") for fork in found[1].split(",")] if found else []
        return [(lineage, int(step)) for lineage, _, step in pairs]

    @property
    def archived(self) -> bool:
        """Trained and committed: kept for those who look back, never delivered again."""
        return " archived_ms=" in self.header

    @property
    def gids(self) -> list[str]:
        return [entry.gid for entry in self.entries]

    @property
    def lines(self) -> list[str]:
        """As the server keeps them: see `parse`."""
        return [self.header, *(entry.line for entry in self.entries)]

    @classmethod
    def parse(cls, step: int, lines: Sequence[str]) -> Manifest:
        """A header and one line per group, as the server keeps them."""
        return cls(step, lines[0], tuple(ManifestEntry.parse(line) for line in lines[1:]))


@dataclass(frozen=True, slots=True)
class NotReady:
    """Why a batch cannot be taken yet: (ready, wanted) groups of each task; empty while recovering.

    `checkpoint_now`: no group is started, for want of memory that batches hold which only a
    checkpoint frees (I12).
    """

    missing: Mapping[str, tuple[int, int]]
    recovering: bool = False
    checkpoint_now: bool = False

    def __str__(self) -> str:
        if self.recovering:
            return "recovering after a trainer was opened"
        short = [
            f"{task} {ready} of {wanted}"
            for task, (ready, wanted) in self.missing.items()
            if ready < wanted
        ]
        waiting = "waiting for groups: " + ", ".join(short)
        return (
            f"{waiting}; memory is held by batches that are not committed"
            if self.checkpoint_now
            else waiting
        )
