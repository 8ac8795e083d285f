"""Read the groups of a taken batch; find out which of them cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from buffer.errors import PayloadMissing, WireError
from buffer.model.job import PayloadRef
from buffer.model.manifest import Manifest
from buffer.rollouts.group import RolloutGroup
from buffer.run import Run
from consumer.handle.content_check import check_content

Known = Mapping[PayloadRef, RolloutGroup]
"""Groups that were read ahead."""

NOTHING: Known = {}

Problems = dict[str, str]
"""Why groups cannot be used, by gid."""


class GroupReader(Protocol):
    """Reads the groups of a batch that this process trains."""

    vocabulary: int | None
    """number of the model's token ids; None: ids are not compared with it"""

    def read(
        self, manifest: Manifest, known: Known = NOTHING
    ) -> tuple[list[RolloutGroup], Problems]:
        """Return the groups, or why some of the batch cannot be used; they are then replaced."""


class BatchReader:
    """Reads all groups of a batch.

    `trains`: finds the groups, too, that cannot be trained (`check_content`).
    """

    def __init__(self, run: Run, *, trains: bool = True) -> None:
        self._buffer = run.buffer
        self._trains = trains
        self.vocabulary: int | None = None

    def read(
        self, manifest: Manifest, known: Known = NOTHING
    ) -> tuple[list[RolloutGroup], Problems]:
        """Return the groups, of which those in `known` are not read, or why some are unusable."""
        if not manifest.entries:
            return [], {}
        try:
            groups = self._buffer.load(manifest, known)
        except (WireError, PayloadMissing):
            problems = _collect(manifest.entries, lambda entry: self._buffer.read(entry.payload))
            if problems:
                return [], problems
            # it was a group that was read ahead
            groups = self._buffer.load(manifest)
        checked = groups if self._trains else []
        return groups, _collect(checked, lambda group: check_content(group, self.vocabulary))


class _HasId(Protocol):
    @property
    def gid(self) -> str: ...


G = TypeVar("G", bound=_HasId)


def _collect(groups: Iterable[G], check: Callable[[G], object]) -> Problems:
    problems = {}
    for group in groups:
        try:
            check(group)
        except (WireError, PayloadMissing) as error:
            problems[group.gid] = f"{type(error).__name__}: {error}"
    return problems
