"""Weights that a trainer hands over from its memory: what they are, and how to meet it.

This is all that goes through Redis: a key of the run, whose digest stands in the control state. The tensors go from
process to process (rendezvous.py, process_group.py). A copy in a folder follows a moment later, for whoever comes when
the trainer is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import orjson

from buffer.errors import WireError
from buffer.keys import Keys
from buffer.store import Store
from buffer.weights import manifest as weights_manifest
from buffer.weights.redis_chunks import WeightsChunks

ADDRESS = "transfer:"
"""What the path of weights begins with that are handed over; their label follows."""


class FileFacts(NamedTuple):
    bytes: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class Announcement:
    """One version. `token` is the secret that lets a worker in; whoever may read the run's keys has it.

    tensors: name -> shape of all tensors in `files`, which are safetensors. checksum: of the manifest in `folder`.
    """

    label: str
    backend: str
    host: str
    port: int
    token: str
    folder: str
    checksum: str
    files: Mapping[str, FileFacts]
    tensors: Mapping[str, tuple[int, ...]]

    def to_json(self) -> bytes:
        # "files" at the top is the list of chunks that a version in Redis has: here there are none
        offer = asdict(self) | {
            "files": {name: facts._asdict() for name, facts in self.files.items()}
        }
        return orjson.dumps({"weights": self.label, "files": {}, "offer": offer})

    @classmethod
    def parse(cls, data: bytes | str) -> Announcement:
        """Raises WireError where this is none."""
        try:
            offer: dict[str, Any] = orjson.loads(data)["offer"]
            files = {
                name: FileFacts(int(f["bytes"]), str(f["blake2b"]))
                for name, f in offer.pop("files").items()
            }
            tensors = {
                name: tuple(int(n) for n in shape) for name, shape in offer.pop("tensors").items()
            }
            texts = {
                name: str(offer[name])
                for name in ("label", "backend", "host", "token", "folder", "checksum")
            }
            return cls(**texts, port=int(offer["port"]), files=files, tensors=tensors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WireError(f"this announces no weights: {error!r}") from error


class Announcements:
    """Those of one run."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store, self._keys = store, keys
        self._chunks = WeightsChunks(store, keys)

    def write(self, announcement: Announcement) -> tuple[str, str]:
        """Returns (address, checksum) for `publish_weights`."""
        label, data = announcement.label, announcement.to_json()
        self._chunks.drop(label)
        # listed first: whoever clears up finds what was begun
        self._ask("RPUSH", self._keys.weights, label)
        self._ask("SET", self._keys.weights_part(label), data)
        return ADDRESS + label, weights_manifest.digest(data)

    def read(self, label: str, checksum: str) -> Announcement:
        """Raises WireError where it is gone, or not what was published."""
        data = self._ask("GET", self._keys.weights_part(label))
        if data is None:
            raise WireError(
                f"the server has no announcement of the weights {label}",
                hint="newer ones are there",
            )
        weights_manifest.check(data, checksum)
        return Announcement.parse(data)

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep`."""
        for label in self._chunks.labels()[:-keep]:
            self._chunks.drop(label)

    def _ask(self, *command: Any) -> Any:
        return self._store.each("weights", [command])[0]
