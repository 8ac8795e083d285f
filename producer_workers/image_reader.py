"""Read the images of a payload from the run's own folder, and find their tokens in its prompt.

Each image is a run of the model's image token in the prompt. Models that write more than such a run
(rows, tiles) are refused where they are met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from buffer.errors import MediaError
from buffer.redis.media_folder import SCHEME, MediaFolder
from buffer.rollouts.rollout import MediaRef
from producer_workers.config.dataset import ImagesSection
from producer_workers.images import load_image

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image as RGB. `digest` differs between any two files."""

    pixels: Image
    digest: str


class ImageReader:
    """Reads images within the limits from `media`, the folder of a run (None: it has none)."""

    def __init__(self, media: MediaFolder | None, limits: ImagesSection) -> None:
        self._media = media
        self._limits = limits

    def read(self, ref: MediaRef) -> ReadImage:
        """Return one image.

        Raises MediaError, also for a URI elsewhere, since the author of the payload chose it.
        """
        if ref.kind != "image":
            raise MediaError(f"{ref.uri[:200]} is {ref.kind}; only images are supported")
        if self._media is None or not ref.uri.startswith(SCHEME):
            hint = "the producer puts images into [run] media"
            raise MediaError(
                f"{ref.uri[:200]!r} is not a file of the run, and nothing else is read", hint=hint
            )
        data = self._media.read(ref.uri, self._limits.max_bytes)
        try:
            pixels = load_image(data, self._limits).pixels
        except MediaError as error:
            raise MediaError(f"{ref.uri}: {error.message}") from error
        return ReadImage(pixels, blake2b(data, digest_size=16).hexdigest())


def find_runs(
    prompt_ids: NDArray[np.int32], image_token: int, tokens: Sequence[int]
) -> list[slice]:
    """Return the runs of tokens of the images with these numbers of tokens, in order.

    Raises ValueError where they do not fit.
    """
    positions = np.flatnonzero(prompt_ids == image_token)
    runs = []
    done = 0
    for number, count in enumerate(tokens):
        run = positions[done : done + count]
        if not 0 < len(run) == count or run[-1] - run[0] != count - 1:
            raise ValueError(
                f"the prompt has no {count} tokens {image_token} in a row for image {number}"
            )
        runs.append(slice(int(run[0]), int(run[-1]) + 1))
        done += count
    return runs


def collapse(prompt_ids: NDArray[np.int32], runs: Sequence[slice]) -> list[int]:
    """Return the prompt with one image token for each run, as a model's processor expects it."""
    kept = np.ones(len(prompt_ids), bool)
    for run in runs:
        kept[run.start + 1 : run.stop] = False
    collapsed: list[int] = prompt_ids[kept].tolist()
    return collapsed
