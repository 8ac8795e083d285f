"""What a payload refers to, as pixels: files of the run's own folder, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from buffer.config.dataset import ImagesSection
from buffer.errors import MediaError
from buffer.media import SCHEME, MediaFolder
from buffer.rollout import MediaRef
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
        self._media, self._limits = media, limits

    def read(self, ref: MediaRef) -> ReadImage:
        """Raises MediaError: for a URI elsewhere, too, since whoever wrote the payload chose it."""
        if ref.kind != "image":
            raise MediaError(f"{ref.uri[:200]} is {ref.kind}; only images are shown")
        if self._media is None or not ref.uri.startswith(SCHEME):
            hint = "the producer puts images into [run] media"
            raise MediaError(f"{ref.uri[:200]!r} is no file of the run, and nothing else is read", hint=hint)
        data = self._media.read(ref.uri, self._limits.max_bytes)
        try:
            pixels = load_image(data, self._limits).pixels
        except MediaError as error:
            raise MediaError(f"{ref.uri}: {error.message}") from error
        return ReadImage(pixels, blake2b(data, digest_size=16).hexdigest())
