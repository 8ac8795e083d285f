"""What the two ends of a transport of weights agree on.

Control carries the address and checksum that a sender returns; the address says to the receiver
(receiver.py) how the version is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import orjson

from buffer.errors import WireError
from buffer.weights.checksums import FileChecksums
from buffer.wire.rollout import PolicyVersion

TransportName = Literal["folder", "redis", "gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Announcement:
    """One version. `token` admits an engine's process; readers of the run's keys have it.

    folder, checksum: the copy on disk, and the checksum of its manifest.
    files: the safetensors files that are sent, in order. tensors: shapes of their tensors, by name.
    """

    label: str
    backend: str
    host: str
    port: int
    token: str
    folder: str
    checksum: str
    files: Mapping[str, FileChecksums]
    tensors: Mapping[str, tuple[int, ...]]

    def to_json(self) -> bytes:
        """Return the record for `VersionStore`; its empty "files" means that it has no chunks."""
        offer = asdict(self)
        offer["files"] = {name: facts.to_json() for name, facts in self.files.items()}
        return orjson.dumps({"weights": self.label, "files": {}, "offer": offer})

    @classmethod
    def parse(cls, data: bytes | str) -> Announcement:
        try:
            offer: dict[str, Any] = orjson.loads(data)["offer"]
            files = {name: FileChecksums.parse(facts) for name, facts in offer["files"].items()}
            tensors = {
                name: tuple(int(n) for n in shape) for name, shape in offer["tensors"].items()
            }
            names = ("label", "backend", "host", "token", "folder", "checksum")
            texts = {name: str(offer[name]) for name in names}
            return cls(**texts, port=int(offer["port"]), files=files, tensors=tensors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WireError(f"not an announcement of weights: {error!r}") from error


Save = Callable[[Path], object]
"""Writes files of weights into a folder; those it returns as `WrittenFiles` are not read again."""


class PublishedWeights(NamedTuple):
    """The location of a version.

    address: a folder, or the scheme of a transport and what follows it.
    checksum: of the manifest or announcement found there; empty if the publisher gave none.
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
