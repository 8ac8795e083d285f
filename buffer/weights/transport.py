"""Types shared by the senders and receivers of weights.

Control carries the address and checksum that a sender returns; the address says to the receiver
(transports.py) how the version is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from buffer.wire.rollout import PolicyVersion

TransportName = Literal["folder", "redis"]


Save = Callable[[Path], object]
"""Writes files of weights into a folder; those it returns as `WrittenFiles` are not read again."""


class PublishedWeights(NamedTuple):
    """The location of a version.

    address: a folder, or the scheme of a transport and what follows it.
    checksum: of the manifest found there; empty if the publisher gave none.
    """

    address: str
    checksum: str


class WeightsSender(Protocol):
    def write(self, weights: PolicyVersion, save: Save) -> PublishedWeights:
        """Store one version, whose files `save` writes."""

    def prune(self) -> None:
        """Delete old versions. Called after each publication."""

    def clear(self) -> None:
        """Delete what a trainer left that was killed while it wrote."""

    def close(self) -> None:
        """Stop: nothing more is published. What was published stays where that is possible."""
