"""Check and decode images, keep those of a run as files, and find their tokens in a prompt.

Invariant: untrusted pixels are decoded only after format, bytes and size were checked. Every reader
sees stored bytes alike: `Image.open(file).convert("RGB")`. An image is one run of the image token;
models that write more (rows, tiles) are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import RolloutMQError
from buffer.imports import import_extra
from buffer.readable import format_size
from buffer.redis.whole_file import replace_file
from buffer.wire.rollout import MediaRef
from producer_workers.config.dataset import ImagesSection

if TYPE_CHECKING:
    from PIL.Image import Image


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others are rare, and some decoders start programs
FOLDER = "images"  # in the run's folder
URI = re.compile(rf"{FOLDER}/([0-9a-f]{{40}})\.[a-z]{{1,8}}")


class ImageError(RolloutMQError):
    """An image cannot be used: missing, too large, of another format or broken."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    data: bytes
    suffix: str
    pixels: Image


def check_image(source: bytes | Path, limits: ImagesSection) -> None:
    """Raise ImageError if the first bytes show no image, or one that is too large."""
    with _opened(source, limits):
        pass


def load_image(source: bytes | Path, limits: ImagesSection) -> ImageFile:
    """Decode a file or its bytes; of several frames, the first. Raises ImageError."""
    with _file(source, limits) as file:
        data = file.read(limits.max_bytes + 1)
    with _opened(data, limits) as image:
        image.load()
        suffix = str(image.format).lower()
        # the Exif tag of a camera's orientation
        if image.getexif().get(0x0112, 1) != 1:
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
                raise ImageError(
                    f"it has {width} x {height} pixels, over max_pixels = {limits.max_pixels}"
                )
            yield image
    except ImageError:
        raise
    except pil.DecompressionBombError as error:
        raise ImageError(f"it would decode to far too many pixels: {error}") from error
    except pil.UnidentifiedImageError as error:
        raise ImageError(f"its format is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error …
        raise ImageError(f"it is a broken image: {error}") from error


def _file(source: bytes | Path, limits: ImagesSection) -> IO[bytes]:
    if isinstance(source, bytes):
        _check_bytes(len(source), limits)
        return BytesIO(source)
    try:
        if not source.is_file():  # opening a pipe would block
            raise ImageError("there is no such file")
        _check_bytes(source.stat().st_size, limits)
        return source.open("rb")
    except OSError as error:
        raise ImageError(f"it cannot be read: {error.strerror}") from error


def _check_bytes(count: int, limits: ImagesSection) -> None:
    if count > limits.max_bytes:
        raise ImageError(
            f"it has {format_size(count)}, over max_bytes = {format_size(limits.max_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image as RGB, and the digest of its file."""

    pixels: Image
    digest: str


class ImageFolder:
    """The images of a run, each once: `images/<BLAKE2b of its bytes>.<suffix>` in the run's folder.

    A file never changes and lives as long as the run's folder, so any number of processes may write
    it. A process that dies in between leaves a hidden file, which is never read.
    """

    def __init__(self, run_folder: Path, limits: ImagesSection) -> None:
        self._run_folder = run_folder
        self._limits = limits

    def put(self, data: bytes, suffix: str) -> str:
        """Write an image unless it is there, and return its path in the run's folder."""
        uri = f"{FOLDER}/{digest_of(data)}.{suffix}"
        path = self._run_folder / uri
        if path.is_file():
            return uri
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
        return uri

    def read(self, ref: MediaRef) -> ReadImage:
        """Return one image. Raises ImageError, also for a URI outside of the folder."""
        if ref.kind != "image":
            raise ImageError(f"{ref.uri[:200]} is {ref.kind}; only images are supported")
        if not (named := URI.fullmatch(ref.uri)):
            raise ImageError(
                f"{ref.uri[:200]!r} is not an image of the run, and nothing else is read",
                hint=f"the producer writes images into {FOLDER}/ of the run's folder",
            )
        path = self._run_folder / ref.uri
        try:
            # O_NONBLOCK: opening a named pipe would block
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(path, flags), "rb") as file:
                data = file.read(self._limits.max_bytes + 1)
        except OSError as error:
            raise ImageError(
                f"{path} cannot be read: {error.strerror}",
                hint="[run] dir of a run with images is a folder that all processes see",
            ) from error
        _check_bytes(len(data), self._limits)
        if (digest := digest_of(data)) != named[1]:
            raise ImageError(
                f"{path} has changed", hint="delete it: it is written again when drawn"
            )
        try:
            return ReadImage(load_image(data, self._limits).pixels, digest)
        except ImageError as error:
            raise ImageError(f"{path}: {error.message}") from error


def digest_of(data: bytes) -> str:
    return blake2b(data, digest_size=20).hexdigest()


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
