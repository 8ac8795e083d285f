"""The manifest of a folder of weights: which files, how large, with which checksum.

Written last by the publisher, whose folder is renamed into place as a whole; read by every worker. The
checksum of the manifest itself travels in the control state, so a folder that was replaced, torn or half
copied is noticed wherever it is read.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson

from buffer.errors import WireError

NAME = "manifest.json"


def write(folder: Path, label: str) -> str:
    """Write the manifest of all files in `folder`; returns its checksum. `label` names the weights, for people."""
    files = {f.name: {"bytes": f.stat().st_size, "blake2b": _digest(f)} for f in sorted(folder.iterdir())}
    data = orjson.dumps({"weights": label, "files": files}, option=orjson.OPT_INDENT_2)
    (folder / NAME).write_bytes(data)
    return digest(data)


def verify(folder: Path, checksum: str) -> None:
    """Raises WireError (or OSError) unless the folder is whole and the very one that `checksum` speaks of."""
    data = (folder / NAME).read_bytes()
    check(data, checksum)
    for name, facts in orjson.loads(data)["files"].items():
        if _digest(folder / name) != facts["blake2b"]:
            raise WireError(f"{name} is not what the manifest says")


def check_sizes(folder: Path, checksum: str) -> None:
    """The quick half of `verify`: the manifest, and that every file is there and as long as it says."""
    data = (folder / NAME).read_bytes()
    check(data, checksum)
    for name, facts in orjson.loads(data)["files"].items():
        if (size := (folder / name).stat().st_size) != facts["bytes"]:
            raise WireError(f"{name} has {size} bytes, not {facts['bytes']}")


def digest(manifest: bytes) -> str:
    """The checksum of a manifest: BLAKE2b, 16 bytes in hex."""
    return hashlib.blake2b(manifest, digest_size=16).hexdigest()


def check(manifest: bytes, checksum: str) -> None:
    """Raises WireError unless `checksum` is that of the manifest."""
    if (found := digest(manifest)) != checksum:
        raise WireError(f"the manifest has checksum {found}, {checksum} was published")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
