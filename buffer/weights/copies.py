"""Versions of weights that are copied to a place apart, and from there to the hosts of workers.

A place is the run's server (redis_chunks.py) or what `[weights] url` names (transports.py).

Invariant: what `read` leaves in a folder has the checksum that was published.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from buffer.errors import WireError
from buffer.weights import folder_manifest as manifest
from buffer.weights.new_folder import clear_temporary, temporary_prefix
from buffer.weights.transport import PublishedWeights, Save
from buffer.wire.rollout import PolicyVersion


class Versions(Protocol):
    """The versions at a place, each with its manifest and the files that it lists.

    The methods raise OSError, WireError, PublicationFailed, StoreUnavailable or LostRun.
    """

    @property
    def prefix(self) -> str:
        """What stands before the name of a version in its address: a scheme and what follows."""

    def prepare(self) -> None:
        """Make the place ready for a sender. Raises ConfigError. A receiver creates nothing."""

    def names(self) -> list[str]:
        """Return all versions, whole or not, the oldest first."""

    def find(self, name: str) -> bytes | None:
        """Return the manifest of a version; None unless the version is whole."""

    def write(self, label: str, folder: Path) -> str:
        """Store the files of a folder, its manifest last; return the name of the version.

        label: "lineage:version".
        """

    def read(self, name: str, record: bytes, folder: Path) -> None:
        """Write the files that the manifest `record` lists into an empty folder, unverified."""

    def drop(self, name: str) -> None:
        """Delete a version, its manifest first."""


def record_of(versions: Versions, name: str, checksum: str) -> bytes:
    """Return a version's manifest. Raises WireError if it is missing or not the published one."""
    record = versions.find(name)
    if record is None:
        hint = "they may have been replaced by newer ones"
        raise WireError(f"there are no weights {versions.prefix}{name}", hint=hint)
    manifest.check(record, checksum)
    return record


def read(versions: Versions, name: str, checksum: str, folder: Path) -> None:
    """Write a version into an empty folder. Raises WireError unless it is the published one."""
    record = record_of(versions, name, checksum)
    (folder / manifest.NAME).write_bytes(record)
    versions.read(name, record, folder)
    manifest.verify(folder, checksum)


class CopySender:
    """Copies versions to a place. The newest `keep` stay, and one more while it is published.

    `folder` of the run names the temporary folder in which a version is written first.
    """

    def __init__(self, versions: Versions, folder: Path, *, keep: int = 3) -> None:
        self._versions = versions
        self._prefix = temporary_prefix(folder)
        self._keep = keep
        self._newest = ""
        versions.prepare()

    def write(self, weights: PolicyVersion, save: Save) -> PublishedWeights:
        label = str(weights)
        with TemporaryDirectory(prefix=self._prefix) as temporary:
            folder = Path(temporary)
            checksum = manifest.write(folder, label, saved=save(folder))
            self._newest = self._versions.write(label, folder)
        return PublishedWeights(self._versions.prefix + self._newest, checksum)

    def prune(self) -> None:
        """Delete all but the newest versions, even if a worker reads one: it gets a newer one."""
        # the one just written counts as the newest even if a clock was set back
        names = sorted(self._versions.names(), key=lambda name: name == self._newest)
        for name in names[: -self._keep]:
            self._versions.drop(name)

    def clear(self) -> None:
        """Delete what a trainer left that was killed while it wrote."""
        clear_temporary(self._prefix)
        for name in self._versions.names():
            if self._versions.find(name) is None:
                self._versions.drop(name)

    def close(self) -> None:
        """Do nothing: what was published stays."""
