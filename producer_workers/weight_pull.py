"""Weights on their way in: a torn or foreign folder is refused before the engine sees it (I9).

The publisher writes a manifest beside the files; control carries the manifest's checksum.
"""

from __future__ import annotations

from pathlib import Path

from buffer.errors import WireError
from buffer.weights_manifest import verify
from producer_workers.engines.base import WeightsError


def verify_weights(folder: Path, checksum: str) -> None:
    """Raises WeightsError unless `folder` holds what its manifest, and `checksum` of it, say. '' checks nothing."""
    if not checksum:
        return
    try:
        verify(folder, checksum)
    except (OSError, WireError) as error:
        raise WeightsError(f"weights in {folder} are not whole: {error}") from error
