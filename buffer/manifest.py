"""The record of one batch, in order (I5), or the reason why the batch is not ready."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buffer.ids import split_group_id
from buffer.job import PayloadRef

_LINE = re.compile(
    r"([\w.-]+-\d{10}) (\S+) ([1-9]\d{0,3}) (\d+) (-|[0-9a-f]+) (\d+) (-|\d+)", re.ASCII
)


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    payload: PayloadRef
    samples: int
    version: int | None

    @property
    def gid(self) -> str:
        return self.payload.gid

    @property
    def line(self) -> str:
        """Return the entry as the server keeps it."""
        ref = self.payload
        version = "-" if self.version is None else self.version
        crc = ref.crc or "-"
        return f"{ref.gid} {ref.token} {ref.chunks} {ref.size} {crc} {self.samples} {version}"

    @classmethod
    def parse(cls, line: str) -> ManifestEntry:
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{line[:200]!r} is not the line of a group")
        gid, token, chunks, size, crc, samples, version = match.groups()
        ref = PayloadRef(gid, token, int(chunks), int(size), "" if crc == "-" else crc)
        return cls(ref, int(samples), None if version == "-" else int(version))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The batch of a train step: its groups in order, and how they were requested (`header`)."""

    step: int
    header: str
    entries: tuple[ManifestEntry, ...]

    @property
    def is_recorded(self) -> bool:
        """Return whether the step is taken; False where no group was asked for."""
        return bool(self.header)

    @property
    def revision(self) -> int:
        """Return the number of groups that were quarantined since the batch was taken."""
        found = re.search(r" revision=(\d+)", self.header)
        return int(found[1]) if found else 0

    @property
    def is_complete(self) -> bool:
        """Return whether all lines that were asked for are here, or left open."""
        asked = re.search(r" asked=(\S+) strict=1", self.header)
        counts = [pair.rpartition("=")[2] for pair in asked[1].split(",")] if asked else []
        return not asked or sum(map(int, counts)) == len(self.entries) + self.open_places.total()

    @property
    def open_places(self) -> Counter[str]:
        """Return the positions, by task, of quarantined groups that were not replaced."""
        found = re.search(r" quarantined=(\S+)", self.header)
        notes = found[1].split(",") if found else []
        return Counter(
            split_group_id(note.partition(":")[0])[0] for note in notes if note.endswith(":-")
        )

    @property
    def token_threshold(self) -> int | None:
        """Return the staleness from which a single token is not trained; None: no limit."""
        found = re.search(r" tokens=(\d+)", self.header)
        return int(found[1]) if found else None

    @property
    def forks(self) -> list[tuple[str, int]]:
        """Return (lineage, first step) of the newest lineages; empty if tokens never expire."""
        found = re.search(r" forks=(\S+)", self.header)
        pairs = [fork.rpartition(":") for fork in found[1].split(",")] if found else []
        return [(lineage, int(step)) for lineage, _, step in pairs]

    @property
    def archived(self) -> bool:
        """Return whether the batch is committed: it stays readable, but is not delivered again."""
        return " archived_ms=" in self.header

    @property
    def gids(self) -> list[str]:
        return [entry.gid for entry in self.entries]

    @property
    def lines(self) -> list[str]:
        return [self.header, *(entry.line for entry in self.entries)]

    @classmethod
    def parse(cls, step: int, lines: Sequence[str]) -> Manifest:
        """Parse the lines of the server: a header, and one per group. Raises ValueError."""
        if not f"{lines[0]} ".startswith(f"step={step} "):
            raise ValueError(f"its header is {lines[0][:80]!r}")
        return cls(step, lines[0], tuple(ManifestEntry.parse(line) for line in lines[1:]))


@dataclass(frozen=True, slots=True)
class NotReady:
    """Why a batch cannot be taken yet.

    `missing`: (ready, wanted) groups of each task; empty while recovering. `checkpoint_now`: no
    group is started, because only a checkpoint frees memory (I12). `awaits_stragglers`: all are
    ready, and groups run that cannot serve a later step.
    """

    missing: Mapping[str, tuple[int, int]]
    recovering: bool = False
    checkpoint_now: bool = False
    awaits_stragglers: bool = False

    def __str__(self) -> str:
        if self.recovering:
            return "recovering after a trainer was opened"
        if self.awaits_stragglers:
            return 'waiting for groups whose last train step this is (on_straggler = "wait")'
        short = [
            f"{task} {ready} of {wanted}"
            for task, (ready, wanted) in self.missing.items()
            if ready < wanted
        ]
        waiting = "waiting for groups: " + ", ".join(short)
        if self.checkpoint_now:
            waiting += "; memory is held by batches that are not committed"
        return waiting
