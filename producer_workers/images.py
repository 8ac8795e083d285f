"""Check and decode image bytes, read the images of a payload, and find their tokens in its prompt.

Invariant: untrusted pixels are decoded only after format, bytes and size were checked. Every reader
sees stored bytes alike: `Image.open(file).convert("RGB")`. An image is one run of the image token;
models that write more (rows, tiles) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import MediaError
from buffer.imports import import_extra
from buffer.readable import format_size
from buffer.redis.media_folder import SCHEME, MediaFolder
from buffer.wire.rollout import MediaRef
from producer_workers.config.dataset import ImagesSection

if TYPE_CHECKING:
    from PIL.Image import Image


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others are rare, and some decoders start programs
ORIENTATION = 0x0112  # Exif tag of a camera's orientation


@dataclass(frozen=True, slots=True)
class ImageFile:
    data: bytes
    suffix: str
    pixels: Image


def check_image(source: bytes | Path, limits: ImagesSection) -> None:
    """Raise MediaError if the first bytes show no image, or one that is too large."""
    with _opened(source, limits):
        pass


def load_image(source: bytes | Path, limits: ImagesSection) -> ImageFile:
    """Decode a file or its bytes; of several frames, the first. Raises MediaError."""
    with _file(source, limits) as file:
        data = file.read(limits.max_bytes + 1)
    with _opened(data, limits) as image:
        image.load()
        suffix = str(image.format).lower()
        if image.getexif().get(ORIENTATION, 1) != 1:
            from PIL import ImageOps

            # Stored upright: otherwise its orientation would depend on the reader.
            image = ImageOps.exif_transpose(image)
            suffix = "png"
            data = png_of(image)
        return ImageFile(data, suffix, image.convert("RGB"))


def png_of(image: Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@contextmanager
def _opened(source: bytes | Path, limits: ImagesSection) -> Iterator[Any]:
    pil = import_extra("PIL.Image", "a data set with images")
    try:
        with _file(source, limits) as file, pil.open(file, formats=FORMATS) as image:
            width, height = image.size
            if width * height > limits.max_pixels:
                raise MediaError(
                    f"it has {width} x {height} pixels, over max_pixels = {limits.max_pixels}"
                )
            yield image
    except MediaError:
        raise
    except pil.DecompressionBombError as error:
        raise MediaError(f"it would decode to far too many pixels: {error}") from error
    except pil.UnidentifiedImageError as error:
        raise MediaError(f"its format is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error …
        raise MediaError(f"it is a broken image: {error}") from error


def _file(source: bytes | Path, limits: ImagesSection) -> IO[bytes]:
    if isinstance(source, bytes):
        _check_bytes(len(source), limits)
        return BytesIO(source)
    try:
        if not source.is_file():  # opening a pipe would block
            raise MediaError("there is no such file")
        _check_bytes(source.stat().st_size, limits)
        return source.open("rb")
    except OSError as error:
        raise MediaError(f"it cannot be read: {error.strerror}") from error


def _check_bytes(count: int, limits: ImagesSection) -> None:
    if count > limits.max_bytes:
        raise MediaError(
            f"it has {format_size(count)}, over max_bytes = {format_size(limits.max_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image as RGB. `digest` differs between any two files."""

    pixels: Image
    digest: str


class ImageReader:
    """Reads images within the limits from `media`, the folder of a run, if it has one."""

    def __init__(self, media: MediaFolder | None, limits: ImagesSection) -> None:
        self._media = media
        self._limits = limits

    def read(self, ref: MediaRef) -> ReadImage:
        """Return one image. Raises MediaError, also for a URI outside of `media`."""
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
    """Return the run of tokens of each image, given their lengths. Raises ValueError."""
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
    """Return the prompt with one image token per run, as a model's processor expects it."""
    kept = np.ones(len(prompt_ids), bool)
    for run in runs:
        kept[run.start + 1 : run.stop] = False
    collapsed: list[int] = prompt_ids[kept].tolist()
    return collapsed
