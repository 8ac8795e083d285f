"""The experts that workers handed in for rollouts: whether they are of this model, and as a micro-batch has its tokens.

They come from strangers, as columns or as files: nothing is read beyond what a rollout of its length can have.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError, MediaError, WireError
from buffer.media import MediaFolder

Ints = NDArray[np.int64]
Recorded = NDArray[np.int16] | str | None
"""As of `RolloutState.routed_experts`."""

_npy: Any = np.lib.format  # its functions have no types

HEADER_BYTES = 128
"""What a file may have beside its numbers: all that numpy writes."""


class Routed(Protocol):
    """What is asked of a group."""

    prompt_ids: NDArray[np.int32]
    lengths: NDArray[np.int64]

    def experts(self) -> list[Recorded]: ...


class RecordedExperts:
    """For a model that gives each token `top_k` of its `experts` in each of its layers."""

    def __init__(self, layers: int, top_k: int, experts: int, media: MediaFolder | None = None) -> None:
        self._shape, self._experts, self._media = (layers, top_k), experts, media

    def problem(self, group: Routed) -> str:
        """Why this model cannot be told what the engine chose for a group; "" where it can."""
        for number, (recorded, length) in enumerate(zip(group.experts(), group.lengths.tolist(), strict=True)):
            try:
                if length:
                    self._read(recorded, len(group.prompt_ids) + length)
            except WireError as error:
                return f"rollout {number} {error}"
        return ""

    def of_slots(self, rollouts: Iterable[Recorded], first: Ints, totals: Ints, slots: int) -> NDArray[np.int16]:
        """int16[slots, layers, top_k] of rollouts whose tokens begin at the slots `first` and are `totals` many.

        -1 for the last token of each, which was never routed, and for slots without a token. Raises WireError where a
        rollout has none, or none that could be replayed.
        """
        table = np.full((slots, *self._shape), -1, "<i2")
        for recorded, start, total in zip(rollouts, first.tolist(), totals.tolist(), strict=True):
            table[start : start + total - 1] = self._read(recorded, total)
        return table

    def _read(self, recorded: Recorded, total: int) -> NDArray[np.int16]:
        """Of a rollout of `total` tokens."""
        shape = (total - 1, *self._shape)
        if recorded is None:
            raise WireError("came without the experts that were chosen for it")
        experts = self._read_file(recorded, shape) if isinstance(recorded, str) else recorded
        if experts.shape != shape:
            raise WireError(f"has routed experts of the shape {list(experts.shape)}, here it is {list(shape)}")
        if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < self._experts:
            raise WireError(f"chose an expert that a model of {self._experts} experts does not have")
        return experts

    def _read_file(self, uri: str, shape: tuple[int, ...]) -> NDArray[np.int16]:
        if self._media is None:
            raise WireError(f"has its routed experts at {uri[:200]}, and this run has no media folder")
        try:
            return _array(self._media.read(uri, HEADER_BYTES + 2 * int(np.prod(shape))))
        except (ConfigError, MediaError, ValueError) as error:
            raise WireError(f"has routed experts that cannot be read: {error}") from error


def _array(data: bytes) -> NDArray[np.int16]:
    """Of a .npy file. ValueError where it is none of int16."""
    file = BytesIO(data)
    version = _npy.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"version {version} of the format")
    shape, is_fortran, dtype = _npy.read_array_header_1_0(file)
    if is_fortran or dtype != np.dtype("<i2"):
        raise ValueError(f"numbers of the type {dtype}")
    return np.frombuffer(data, "<i2", offset=file.tell()).reshape(shape)
