"""The experts that workers recorded for rollouts: checked, and assigned to a micro-batch's tokens.

The data comes from outside, as columns or as files. No more is read than a rollout of its length
can have.
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
"""As in `RolloutState.routed_experts`."""

# its functions have no types
_npy: Any = np.lib.format

HEADER_BYTES = 128
"""Bytes of a file beside its numbers: the header that numpy writes."""


class RoutedGroup(Protocol):
    """The columns of a group that `RecordedExperts` reads.

    Usage:

        problem = recorded.problem(group)    # group: RoutedGroup
    """

    prompt_ids: NDArray[np.int32]
    lengths: NDArray[np.int64]

    def experts(self) -> list[Recorded]: ...


class RecordedExperts:
    """Read experts recorded for a model with `top_k` of `experts` experts per token in each layer.

    `media`: the folder with the files of recorded experts, where the run has one.

        recorded = replay.recorded_experts(run.media)
        packer = Packer(8192, recorded=recorded)
    """

    def __init__(
        self, layers: int, top_k: int, experts: int, media: MediaFolder | None = None
    ) -> None:
        self._shape = (layers, top_k)
        self._experts = experts
        self._media = media

    def problem(self, group: RoutedGroup) -> str:
        """Return why the experts of a group cannot be replayed; "" where they can."""
        rollouts = zip(group.experts(), group.lengths.tolist(), strict=True)
        for index, (recorded, length) in enumerate(rollouts):
            try:
                if length:
                    self._read(recorded, len(group.prompt_ids) + length)
            except WireError as error:
                return f"rollout {index} {error}"
        return ""

    def of_slots(
        self, rollouts: Iterable[Recorded], first: Ints, totals: Ints, slots: int
    ) -> NDArray[np.int16]:
        """Return the experts at each slot of a micro-batch, int16[slots, layers, top_k].

        `first`, `totals`: int64[S], the first slot and the number of tokens of each rollout. The
        result is -1 for the last token of each, which is never routed, and for unused slots. Raises
        WireError where a rollout has no experts, or experts that cannot be replayed.
        """
        table = np.full((slots, *self._shape), -1, "<i2")
        placed = zip(rollouts, first.tolist(), totals.tolist(), strict=True)
        for recorded, start, total in placed:
            table[start : start + total - 1] = self._read(recorded, total)
        return table

    def _read(self, recorded: Recorded, total: int) -> NDArray[np.int16]:
        """Return the checked experts of a rollout of `total` tokens."""
        shape = (total - 1, *self._shape)
        if recorded is None:
            raise WireError("has no routed experts")
        experts = self._read_file(recorded, shape) if isinstance(recorded, str) else recorded
        if experts.shape != shape:
            raise WireError(
                f"has routed experts of shape {list(experts.shape)}, expected {list(shape)}"
            )
        if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < self._experts:
            raise WireError(f"has a routed expert outside 0 to {self._experts - 1}")
        return experts

    def _read_file(self, uri: str, shape: tuple[int, ...]) -> NDArray[np.int16]:
        if self._media is None:
            raise WireError(
                f"has its routed experts at {uri[:200]}, and the run has no media folder"
            )
        try:
            return _parse(self._media.read(uri, HEADER_BYTES + 2 * int(np.prod(shape))))
        except (ConfigError, MediaError, ValueError) as error:
            raise WireError(f"has routed experts that cannot be read: {error}") from error


def _parse(data: bytes) -> NDArray[np.int16]:
    """Return the array of a .npy file. Raises ValueError unless it is one of int16."""
    file = BytesIO(data)
    version = _npy.read_magic(file)
    if version != (1, 0):
        raise ValueError(f".npy version {version} is not supported, expected (1, 0)")
    shape, is_fortran, dtype = _npy.read_array_header_1_0(file)
    if is_fortran or dtype != np.dtype("<i2"):
        raise ValueError(f"numbers of type {dtype}, expected int16 in C order")
    return np.frombuffer(data, "<i2", offset=file.tell()).reshape(shape)
