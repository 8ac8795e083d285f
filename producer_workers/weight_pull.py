"""Weights on their way in: what is torn, foreign or gone is refused before the engine sees it (I9).

The publisher writes a manifest beside the files; control carries the manifest's checksum, and where the files are.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from buffer.control import ControlState
from buffer.errors import StoreUnavailable, WireError
from buffer.run import Run
from buffer.weights import announcement, redis_chunks
from buffer.weights.announcement import Announcement, Announcements
from buffer.weights.manifest import verify
from buffer.weights.redis_chunks import WeightsChunks
from producer_workers.engines.base import WeightsError


class WeightPull:
    """Finds the weights that a control state names: in a shared folder, on the run's server, or with the trainer.

    What came from the server lies in a folder of this process. The last one that an engine has loaded stays, as the
    way back from an update that fails.
    """

    def __init__(self, run: Run) -> None:
        self._chunks, self._announcements = WeightsChunks(run.store, run.keys), Announcements(run.store, run.keys)
        self._scratch: TemporaryDirectory[str] | None = None

    def announcement(self, state: ControlState) -> Announcement | None:
        """How to get these weights from the trainer; None where they are not handed over. Raises WeightsError."""
        if not state.weights_path.startswith(announcement.ADDRESS):
            return None
        label = state.weights_path.removeprefix(announcement.ADDRESS)
        try:
            return self._announcements.read(label, state.weights_checksum)
        except (WireError, StoreUnavailable) as error:
            raise WeightsError(f"the weights {label} cannot be met: {error}") from error

    def fetch(self, state: ControlState) -> Path:
        """The folder with these weights, verified. Raises WeightsError; a missing checksum verifies nothing."""
        path, checksum = Path(state.weights_path), state.weights_checksum
        try:
            if state.weights_path.startswith(redis_chunks.ADDRESS):
                return self._download(state.weights_path.removeprefix(redis_chunks.ADDRESS), checksum)
            if announced := self.announcement(state):
                path, checksum = Path(announced.folder), announced.checksum
            if checksum:
                verify(path, checksum)
        except (OSError, WireError, StoreUnavailable) as error:
            raise WeightsError(f"weights in {path} are not whole: {error}") from error
        return path

    def keep_only(self, path: Path) -> None:
        """An engine runs these: what was downloaded before them is deleted."""
        for other in Path(self._scratch.name).iterdir() if self._scratch else ():
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    def _download(self, label: str, checksum: str) -> Path:
        if self._scratch is None:
            self._scratch = TemporaryDirectory(prefix="rolloutmq-weights-")
        folder = Path(self._scratch.name) / label.replace(":", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._chunks.read(label, checksum, folder)
        return folder
