"""Read the groups of a taken batch; find out which of them cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from buffer.errors import PayloadMissing, WireError
from buffer.model.job import PayloadRef
from buffer.model.manifest import Manifest
from buffer.rollouts.group import RolloutGroup
from buffer.run import Run

Known = Mapping[PayloadRef, RolloutGroup]
"""Groups that were read ahead."""

NOTHING: Known = {}

Problems = dict[str, str]
"""Why groups cannot be used, by gid."""


class GroupReader(Protocol):
    """Reads the groups of a batch that this process trains."""

    def read(
        self, manifest: Manifest, known: Known = NOTHING
    ) -> tuple[list[RolloutGroup], Problems]:
        """Return the groups, or why some of the batch cannot be used; they are then replaced."""


class BatchReader:
    """Reads all groups of a batch.

    Usage:

        groups, problems = BatchReader(run).read(manifest)
    """

    def __init__(self, run: Run) -> None:
        self._buffer = run.buffer

    def read(
        self, manifest: Manifest, known: Known = NOTHING
    ) -> tuple[list[RolloutGroup], Problems]:
        """Return the groups without those of `known` being read, or why some cannot be used."""
        if not manifest.entries:
            return [], {}
        try:
            return self._buffer.load(manifest, known), {}
        except (WireError, PayloadMissing):
            problems = self._problems(manifest)
            # without any, it was a group that was read ahead
            return ([], problems) if problems else (self._buffer.load(manifest), {})

    def _problems(self, manifest: Manifest) -> Problems:
        problems = {}
        for entry in manifest.entries:
            try:
                self._buffer.read(entry.payload)
            except (WireError, PayloadMissing) as error:
                problems[entry.gid] = f"{type(error).__name__}: {error}"
        return problems
