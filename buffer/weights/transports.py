"""Both sides of all transports of weights: the config names the trainer's, an address the worker's.

An address comes from Redis. It opens no URL but the one that the config of the reader names. A
version may be changes to the one before (delta.py): they are applied to the version that the engine
runs, or to the chain down to a whole one.

Invariant: the folder that `WeightsReceiver.fetch` returns has the checksums of the whole version.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from pathlib import Path

from buffer.errors import ConfigError, WireError
from buffer.imports import attached, load_function
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.weights import copies, delta
from buffer.weights import folder_manifest as manifest
from buffer.weights.copies import CopySender, Versions
from buffer.weights.host_folders import HostFolders
from buffer.weights.redis_chunks import IN_CHUNKS, VersionStore
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import PublishedWeights, TransportName, WeightsSender

WEIGHTS = "rolloutmq.weights"
"""The group of entry points whose functions return the `Versions` at a URL, by its scheme."""

LONGEST_CHAIN = 1000
"""Most versions between one of changes and the whole one that they begin with."""


def open_sender(
    name: TransportName,
    store: Store,
    keys: Keys,
    folder: Path,
    *,
    keep: int,
    delta_base_every: int = 1,
    url: str | None = None,
) -> WeightsSender:
    """Return a sender that keeps the newest `keep` versions.

    They are kept at `url`, where one is given, else in `folder` or on the server. Raises
    ConfigError. `delta_base_every`: see `DeltaSender`; 1 means that every version is whole.
    """
    keep += delta_base_every - 1  # what the oldest of them is made of
    sender: WeightsSender
    if url:
        sender = CopySender(open_versions(url), folder, keep=keep)
    elif name == "redis":
        sender = CopySender(VersionStore(store, keys), folder, keep=keep)
    else:
        sender = FolderSender(folder, keep=keep)
    if delta_base_every == 1:
        return sender
    return delta.DeltaSender(sender, folder.resolve(), delta_base_every)


def is_url(address: str) -> bool:
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", address))


@lru_cache(maxsize=8)
def open_versions(url: str) -> Versions:
    """Return the versions at a URL, and create nothing there. Raises ConfigError."""
    check_url(url)
    versions: Versions = load_function(
        attached(WEIGHTS)[url.partition("://")[0]], kind="transport of weights"
    )(url)
    return versions


def check_url(url: str) -> None:
    """Raise ConfigError unless something attaches the scheme, and the URL holds no secret."""
    scheme = url.partition("://")[0]
    if not is_url(url) or scheme not in attached(WEIGHTS):
        known = ", ".join(f"{each}://" for each in sorted(attached(WEIGHTS)))
        raise ConfigError(f"weights cannot be kept at {scheme!r}", hint=f"known: {known}")
    if re.search("[@?#]", url):
        raise ConfigError(
            "the URL of weights holds more than a place: workers read it in Redis",
            hint="give credentials and options by the environment, for example AWS_ACCESS_KEY_ID",
        )


class WeightsReceiver:
    """Fetches versions, once for all workers of a host; the loaded one stays until another is.

    `url`: where this process may fetch versions, besides folders and the run's server. Its methods
    raise OSError, WireError, ModelError, StoreUnavailable.
    """

    def __init__(self, store: Store, keys: Keys, url: str | None = None) -> None:
        self._url = url
        self._chunks = VersionStore(store, keys)
        self._folders = HostFolders()
        self._running: Path | None = None  # of the version that the engine runs
        self._wholes: dict[str, Path] = {}  # possible bases, by published checksum

    def check(self, published: PublishedWeights) -> None:
        """Check what a worker will find there, without reading the tensors."""
        if place := self._place(published.address):
            copies.record_of(*place, published.checksum)
            return
        folder = Path(published.address)
        check = manifest.check_sizes if delta.is_delta(folder) else manifest.check_files
        check(folder, published.checksum)

    def fetch(self, published: PublishedWeights) -> Path:
        """Return a folder with these weights, verified. An empty checksum verifies nothing."""
        chain: list[tuple[PublishedWeights, Path]] = []
        folder = self._fetch_one(published)
        while delta.is_delta(folder):
            chain.append((published, folder))
            if len(chain) > LONGEST_CHAIN:
                raise WireError(f"more than {LONGEST_CHAIN} versions of weights without a whole")
            published = delta.base_of(folder)
            folder = self._wholes.get(published.checksum) or self._fetch_one(published)
        for changed, changes in reversed(chain):
            base = folder
            try:
                folder = self._folders.get(
                    f"whole-{changed.checksum}",
                    fill=partial(delta.apply, changes, base),
                    check=partial(delta.check, changes),
                )
            except BaseException:
                # the base may be damaged: the next try fetches it again
                self._wholes.pop(published.checksum, None)
                raise
            if base != self._running:
                self._folders.release(base)
            published = changed
        if published.checksum:
            self._wholes[published.checksum] = folder
        return folder

    def keep_only(self, folder: Path) -> None:
        """Delete local copies other than `folder`, which the engine now runs."""
        self._running = folder
        self._wholes = {c: whole for c, whole in self._wholes.items() if whole == folder}
        self._folders.keep_only(folder)

    def close(self) -> None:
        """Delete all local copies."""
        self._folders.close()

    def _fetch_one(self, published: PublishedWeights) -> Path:
        """Return the verified folder of a version, which may hold changes."""
        address, checksum = published
        place = self._place(address)
        if place is None:
            if checksum:
                manifest.verify(Path(address), checksum)
            return Path(address)
        return self._folders.get(
            f"copy-{checksum}",
            fill=lambda folder: copies.read(*place, checksum, folder),
            check=lambda folder: manifest.verify(folder, checksum),
        )

    def _place(self, address: str) -> tuple[Versions, str] | None:
        """Return where a version is copied from, and its name there; None for a folder."""
        if address.startswith(IN_CHUNKS):
            return self._chunks, address.removeprefix(IN_CHUNKS)
        if not is_url(address):
            return None
        if self._url is None:
            raise self._refused(address)
        try:
            versions = open_versions(self._url)
        except ConfigError as error:  # of this host: what opens it is not installed
            raise WireError(error.message, hint=error.hint) from error
        name = address.removeprefix(versions.prefix)
        if is_url(name) or Path(name).name != name:
            raise self._refused(address)
        return versions, name

    def _refused(self, address: str) -> WireError:
        own = f"is {self._url}" if self._url else "is not set"
        return WireError(
            f"the trainer published weights at {address}, and [weights] url of this process {own}",
            hint="give this process the [weights] url and [run] name of the trainer's config",
        )
