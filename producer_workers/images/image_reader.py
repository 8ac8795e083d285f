"""What a payload refers to, as pixels: files of the run's own folder, and nothing else.

The tokens of a prompt that stand for its images: each is a run of the model's image token.

Models that write more than such a run into the prompt (rows, tiles) are refused where that is met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from buffer.config.dataset import ImagesSection
from buffer.errors import MediaError
from buffer.model.rollout import MediaRef
from buffer.store.media_folder import SCHEME, MediaFolder
from producer_workers.images.image_file import load_image

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image as RGB; `digest` tells its file from every other one."""

    pixels: Image
    digest: str


class ImageReader:
    """Reads from `media`, the folder of a run (None: it has none), what is within the limits."""

    def __init__(self, media: MediaFolder | None, limits: ImagesSection) -> None:
        self._media = media
        self._limits = limits

    def read(self, ref: MediaRef) -> ReadImage:
        """Raises MediaError: for a URI elsewhere, too, since whoever wrote the payload chose it."""
        if ref.kind != "image":
            raise MediaError(f"{ref.uri[:200]} is {ref.kind}; only images are shown")
        if self._media is None or not ref.uri.startswith(SCHEME):
            hint = "the producer puts images into [run] media"
            raise MediaError(
                f"{ref.uri[:200]!r} is no file of the run, and nothing else is read", hint=hint
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
    """Where the images lie whose numbers of tokens are `tokens`, in order. ValueError where they do
    not fit.
    """
    places = np.flatnonzero(prompt_ids == image_token)
    runs, done = [], 0
    for number, count in enumerate(tokens):
        place = places[done : done + count]
        if not 0 < len(place) == count or place[-1] - place[0] != count - 1:
            raise ValueError(
                f"the prompt has no {count} tokens {image_token} in a row for image {number}"
            )
        runs.append(slice(int(place[0]), int(place[-1]) + 1))
        done += count
    return runs


def collapse(prompt_ids: NDArray[np.int32], runs: Sequence[slice]) -> list[int]:
    """The prompt with one image token for each run: as processors of models want it."""
    kept = np.ones(len(prompt_ids), bool)
    for run in runs:
        kept[run.start + 1 : run.stop] = False
    collapsed: list[int] = prompt_ids[kept].tolist()
    return collapsed
