"""The announcement of a version of weights that engines get from the trainer's memory.

Redis stores nothing else of such a version; its checksum is in the control state. The tensors go
from process to process (consumer/senders/tensor_server.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from buffer.errors import WireError
from buffer.weights.checksums import FileFacts


@dataclass(frozen=True, slots=True)
class Announcement:
    """One version. `token` admits an engine's process; readers of the run's keys have it.

    folder, checksum: the copy on disk that follows, and the checksum of its manifest.
    files: the safetensors files that are sent, in order. tensors: shapes of their tensors, by name.
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
        """Return the record for `VersionStore`; its empty "files" means that it has no chunks."""
        offer = asdict(self)
        offer["files"] = {name: facts.to_json() for name, facts in self.files.items()}
        return orjson.dumps({"weights": self.label, "files": {}, "offer": offer})

    @classmethod
    def parse(cls, data: bytes | str) -> Announcement:
        """Parse what `to_json` returned. Raises WireError."""
        try:
            offer: dict[str, Any] = orjson.loads(data)["offer"]
            files = {name: FileFacts.parse(facts) for name, facts in offer["files"].items()}
            tensors = {
                name: tuple(int(n) for n in shape) for name, shape in offer["tensors"].items()
            }
            names = ("label", "backend", "host", "token", "folder", "checksum")
            texts = {name: str(offer[name]) for name in names}
            return cls(**texts, port=int(offer["port"]), files=files, tensors=tensors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WireError(f"not an announcement of weights: {error!r}") from error
