"""The experts that workers handed in for rollouts, laid out as a micro-batch has their tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError, WireError
from buffer.media import MediaFolder

Ints = NDArray[np.int64]
Recorded = NDArray[np.int16] | str | None
"""As of `RolloutState.routed_experts`."""


class RecordedExperts:
    """Reads them from columns, or from files of the run's media folder."""

    def __init__(self, media: MediaFolder | None = None) -> None:
        self._media = media

    def of_slots(self, rollouts: Iterable[Recorded], first: Ints, totals: Ints, slots: int) -> NDArray[np.int16]:
        """int16[slots, layers, top_k] of rollouts whose tokens begin at the slots `first` and are `totals` many.

        -1 for the last token of each, which was never routed, and for slots without a token. Raises ConfigError where
        a rollout has none, WireError where it has too few or too many.
        """
        rows = [self._read(recorded) for recorded in rollouts]
        table = np.full((slots, *rows[0].shape[1:]), -1, "<i2")
        for experts, start, total in zip(rows, first.tolist(), totals.tolist(), strict=True):
            if experts.shape != (total - 1, *table.shape[1:]):
                raise WireError(f"routed experts are {list(experts.shape)} of a rollout of {total} tokens")
            table[start : start + total - 1] = experts
        return table

    def _read(self, recorded: Recorded) -> NDArray[np.int16]:
        if recorded is None:
            hint = "set [engine] routed_experts = true for the workers, or leave out [learner] replay_routing"
            raise ConfigError("a rollout came without the experts that were chosen for it", hint=hint)
        if not isinstance(recorded, str):
            return recorded
        if self._media is None:
            raise ConfigError(f"routed experts lie at {recorded}, and this run has no media folder")
        try:
            read: NDArray[np.int16] = np.load(self._media.path(recorded), allow_pickle=False)
        except (OSError, ValueError) as error:
            hint = "the trainer must see the run's media folder, as the workers do"
            raise WireError(f"the routed experts at {recorded} cannot be read: {error}", hint=hint) from error
        return read
