"""Opens the trainer's side of a transport of weights, by its name or URL in the config."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from buffer.errors import ConfigError
from buffer.imports import attached, load_function
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.weights.copies import CopySender, Versions
from buffer.weights.delta import DeltaSender
from buffer.weights.redis_chunks import VersionStore
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import TransportName, WeightsSender

WEIGHTS = "rolloutmq.weights"
"""The group of entry points whose functions return the `Versions` at a URL, by its scheme."""


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
    return DeltaSender(sender, folder.resolve(), delta_base_every)


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
