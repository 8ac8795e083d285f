"""Opens the trainer's side of a transport of weights, by its name in the config."""

from __future__ import annotations

from pathlib import Path

from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.weights.delta import DeltaSender
from buffer.weights.redis_chunks import RedisSender
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import TransportName, WeightsSender


def open_sender(
    name: TransportName,
    store: Store,
    keys: Keys,
    folder: Path,
    *,
    keep: int,
    delta_base_every: int = 1,
) -> WeightsSender:
    """Return a sender that keeps the newest `keep` versions, in `folder` or on the server.

    `delta_base_every`: see `DeltaSender`; 1 means that every version is whole.
    """
    keep += delta_base_every - 1  # what the oldest of them is made of
    sender: WeightsSender
    if name == "redis":
        sender = RedisSender(store, keys, folder, keep=keep)
    else:
        sender = FolderSender(folder, keep=keep)
    if delta_base_every == 1:
        return sender
    return DeltaSender(sender, folder.resolve(), delta_base_every)
