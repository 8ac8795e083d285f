"""The manifest of a folder of weights: its files, their sizes and their checksums.

The publisher writes it last. Control carries its checksum (BLAKE2b), so that a folder that was
replaced, torn or half copied is noticed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson

from buffer.errors import WireError
from buffer.weights.checksums import FileChecksums, WrittenFiles, check_file, hash_files
from buffer.weights.safetensors_files import read_header, weight_files

NAME = "manifest.json"


def write(folder: Path, label: str, *, saved: object = None) -> str:
    """Write a folder's manifest; return its checksum. `WrittenFiles` in `saved` are not hashed."""
    known = saved if isinstance(saved, WrittenFiles) else WrittenFiles()
    others = [file for file in sorted(folder.iterdir()) if file.name not in known]
    files = known | hash_files(others)
    listed = {name: files[name].to_json() for name in sorted(files)}
    data = orjson.dumps({"weights": label, "files": listed})
    (folder / NAME).write_bytes(data)
    return digest(data)


def files_of(data: bytes | str) -> dict[str, FileChecksums]:
    """Return the files that a manifest lists. Raises WireError, also for names with a folder."""
    try:
        listed = {str(n): FileChecksums.parse(f) for n, f in orjson.loads(data)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"not a manifest of weights: {error!r}") from error
    for name in listed:
        if Path(name).name != name or name in ("", ".", ".."):
            raise WireError(f"the manifest of weights has an invalid file name: {name!r}")
    return listed


def verify(folder: Path, checksum: str) -> None:
    """Raise WireError or OSError unless `folder` is complete and `checksum` its manifest's."""
    data = (folder / NAME).read_bytes()
    check(data, checksum)
    for name, facts in files_of(data).items():
        check_file(folder / name, facts)


def check_sizes(folder: Path, checksum: str) -> list[str]:
    """Check the manifest and file sizes; return the names. Raises as `verify`."""
    data = (folder / NAME).read_bytes()
    check(data, checksum)
    files = files_of(data)
    for name, facts in files.items():
        size = (folder / name).stat().st_size
        if size != facts.bytes:
            raise WireError(f"{name} has {size} bytes, expected {facts.bytes}")
    return list(files)


def check_files(folder: Path, checksum: str) -> None:
    """Check all but the tensors, also headers. Raises as `verify`; ModelError without weights."""
    listed = check_sizes(folder, checksum)
    for file in weight_files(folder):
        if file.name not in listed:
            raise WireError(f"{file.name} is not in the manifest: write that last")
        with file.open("rb") as stream:
            try:
                needed = read_header(stream).file_bytes
            except ValueError as error:
                raise WireError(f"{file.name} is not a safetensors file: {error}") from error
        if file.stat().st_size != needed:
            raise WireError(
                f"{file.name} has {file.stat().st_size} bytes, its header needs {needed}"
            )


def digest(manifest: bytes) -> str:
    return hashlib.blake2b(manifest, digest_size=16).hexdigest()


def check(manifest: bytes, checksum: str) -> None:
    found = digest(manifest)
    if found != checksum:
        raise WireError(f"the manifest has checksum {found}, {checksum} was published")
