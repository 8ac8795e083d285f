"""A transport of weights: a sender in the trainer, and a receiver in each worker, in one file.

Control carries what a sender returns: an address and a checksum. The scheme of the address decides
which receiver reads it (registry.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from buffer.weights.announcement import Announcement
from buffer.wire.rollout import PolicyVersion

Save = Callable[[Path], object]
"""Writes the files of a version of weights into an existing folder. Files for which it returns
checksums, as `WrittenFiles`, are not read again; anything else that it returns is ignored.
"""


class PublishedWeights(NamedTuple):
    """The location of a version.

    address: a folder, or the scheme of a transport and what follows it.
    checksum: of the manifest or announcement found there; empty if the publisher gave none.
    """

    address: str
    checksum: str


class WeightsSender(Protocol):
    """The trainer's side."""

    def write(self, weights: PolicyVersion, save: Save) -> PublishedWeights:
        """Store one version, whose files `save` writes."""

    def prune(self) -> None:
        """Delete old versions. Called after each publication."""

    def clear(self) -> None:
        """Delete what a trainer left that was killed while it wrote."""

    def close(self) -> None:
        """Stop: nothing more is published. What was published stays where that is possible."""


class WeightsReceiver(ABC):
    """A worker's side. Its methods raise OSError, WireError, ModelError, StoreUnavailable."""

    @abstractmethod
    def check(self, published: PublishedWeights) -> None:
        """Check what a worker will find there, without reading the tensors."""

    @abstractmethod
    def fetch(self, published: PublishedWeights) -> Path:
        """Return a folder with these weights, verified. An empty checksum verifies nothing."""

    def announcement(self, published: PublishedWeights) -> Announcement | None:
        """Return how engines get these weights from the trainer's memory, if they can."""
        return None

    def keep_only(self, folder: Path) -> None:  # noqa: B027 - most transports have no local copies
        """Delete local copies other than `folder`, which the engine now runs."""

    def close(self) -> None:  # noqa: B027
        """Delete all local copies."""
