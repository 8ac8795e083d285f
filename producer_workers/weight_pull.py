"""The worker's access to published weights: torn or foreign ones never reach the engine (I9)."""

from __future__ import annotations

from pathlib import Path

from buffer.control import ControlState
from buffer.errors import StoreUnavailable, WireError
from buffer.run import Run
from buffer.weights.announcement import Announcement
from buffer.weights.registry import AnyReceiver
from buffer.weights.transport import PublishedWeights
from producer_workers.engines.base import WeightsError


class WeightPull:
    """Finds the weights that a control state names. Both lookups raise WeightsError."""

    def __init__(self, run: Run) -> None:
        self._receiver = AnyReceiver(run.store, run.keys)

    def announcement(self, state: ControlState) -> Announcement | None:
        """Return how engines get these weights from the trainer's memory, if they can."""
        try:
            return self._receiver.announcement(_published(state))
        except (OSError, WireError, StoreUnavailable) as error:
            message = f"no announcement of the weights {state.weights}: {error}"
            raise WeightsError(message) from error

    def fetch(self, state: ControlState) -> Path:
        """Return a folder with these weights, verified. A missing checksum verifies nothing."""
        try:
            return self._receiver.fetch(_published(state))
        except (OSError, WireError, StoreUnavailable) as error:
            where = state.weights_path
            raise WeightsError(f"cannot use the weights in {where}: {error}") from error

    def keep_only(self, folder: Path) -> None:
        """Delete downloads other than `folder`, which the engine now runs."""
        self._receiver.keep_only(folder)

    def close(self) -> None:
        """Delete all downloads."""
        self._receiver.close()


def _published(state: ControlState) -> PublishedWeights:
    return PublishedWeights(state.weights_path, state.weights_checksum)
