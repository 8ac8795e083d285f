"""Check and decode image bytes from untrusted sources.

Invariant: no pixel is decoded before format, bytes and size were checked, and what is stored is
what every reader sees: `Image.open(file).convert("RGB")`, on both sides, in any library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from buffer.errors import ConfigError, MediaError
from buffer.model.byte_size import format_size
from buffer.model.extras import install_command
from producer_workers.config.dataset import ImagesSection

if TYPE_CHECKING:
    from PIL.Image import Image


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Others are rare, and some of their decoders start programs."""
ORIENTATION = 0x0112
"""The Exif tag of a camera's orientation."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A whole image: the bytes to keep, the suffix of their format, and its pixels as RGB."""

    data: bytes
    suffix: str
    pixels: Image


def check_image(source: bytes | Path, limits: ImagesSection) -> None:
    """Raise MediaError where the first bytes show no image, or one that is too large."""
    with _opened(source, limits):
        pass


def load_image(source: bytes | Path, limits: ImagesSection) -> ImageFile:
    """Decode a file or its bytes; of several frames, the first. Raises MediaError."""
    data = source if isinstance(source, bytes) else _read(source, limits)
    with _opened(data, limits) as image:
        image.load()
        suffix = str(image.format).lower()
        if image.getexif().get(ORIENTATION, 1) != 1:
            # Stored upright: otherwise its orientation would depend on the reader.
            image = _upright(image)
            suffix = "png"
            data = png_of(image)
        return ImageFile(data, suffix, image.convert("RGB"))


def png_of(image: Image) -> bytes:
    """Return the same pixels as a PNG file."""
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _upright(image: Image) -> Image:
    from PIL import ImageOps

    turned: Image = ImageOps.exif_transpose(image)
    return turned


@contextmanager
def _opened(source: bytes | Path, limits: ImagesSection) -> Iterator[Any]:
    pil = _pillow()
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


def _read(source: Path, limits: ImagesSection) -> bytes:
    with _file(source, limits) as file:
        return file.read(limits.max_bytes + 1)


def _check_bytes(count: int, limits: ImagesSection) -> None:
    if count > limits.max_bytes:
        raise MediaError(
            f"it has {format_size(count)}, over max_bytes = {format_size(limits.max_bytes)}"
        )


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise ConfigError("images need Pillow", hint=install_command("images")) from error
    return PIL.Image
