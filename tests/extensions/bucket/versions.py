"""Versions of weights that are large enough for two parts of a bucket."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from buffer.weights.checksums import RawTensor, WrittenFiles, write_tensors
from buffer.weights.transport import Save
from rolloutmq.extensions.bucket import PART_BYTES

LINEAGE = "l1"
WORDS = PART_BYTES // 2 + 100_000
FILE = "model.safetensors"
CONFIG_BYTES = 500_000
"""Of a file that is sent before the tensors."""


def words(version: int) -> NDArray[np.uint16]:
    """Return the weights of a version: each changes a hundredth of those before."""
    found = np.random.default_rng(0).integers(0, 1 << 16, WORDS, np.uint16)
    for number in range(version):
        found[number::100] += 1
    return found


def save(version: int) -> Save:
    def write(folder: Path) -> WrittenFiles:
        (folder / "config.json").write_bytes(b"{}" + b" " * CONFIG_BYTES)
        tensors = {"w": RawTensor("I16", (WORDS,), words(version).data.cast("B"))}
        return WrittenFiles({FILE: write_tensors(folder / FILE, tensors, {})})

    return write


def is_whole(folder: Path, version: int) -> bool:
    found = load_file(folder / FILE)["w"].view(np.uint16)
    return np.array_equal(found, words(version))
