"""What a row may say of an image: a path, a data: URI, bytes, or a picture that some library has unpacked.

Rows are somebody else's. So nothing is fetched for them, and no path leads out of the folder of the images.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from buffer.config.dataset import ImagesSection
from producer_workers.images.image_file import png_of

if TYPE_CHECKING:
    from PIL.Image import Image

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
INLINE = re.compile(r"data:image/[\w.+-]+;base64,")


def find_image(value: Any, root: Path, limits: ImagesSection) -> Path | bytes:
    """The file or the bytes that `value` means. Raises ValueError with the reason.

    Understood: a path (from `root` on, or absolute), file://…, data:image/…;base64,…, bytes, a picture of Pillow, and
    {"bytes": …, "path": …} as `datasets` writes images.
    """
    match value:
        case bytes() if value:
            return value
        case str() if value:
            return _of_text(value, root, limits)
        case Mapping() if value.get("bytes") or value.get("path"):
            return find_image(value.get("bytes") or value["path"], root, limits)
        case _ if type(value).__module__.startswith("PIL."):
            return png_of(cast("Image", value))
    raise ValueError(f"an image is a {type(value).__name__}; expected a path, a data: URI or bytes")


def _of_text(value: str, root: Path, limits: ImagesSection) -> Path | bytes:
    if found := INLINE.match(value):
        return _of_base64(value[found.end() :], limits)
    if value.startswith("file://"):
        return _inside(value.removeprefix("file://"), root)
    if found := SCHEME.match(value):
        raise ValueError(f"nothing is fetched from {found[1]}: URIs; store the image as a file, and name that")
    return _inside(value, root)


def _of_base64(text: str, limits: ImagesSection) -> bytes:
    if len(text) > limits.max_bytes * 4 / 3 + 4:
        raise ValueError(f"the data: URI holds more than max_bytes = {limits.max_bytes}")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data: URI is no base64: {error}") from error


def _inside(path: str, root: Path) -> Path:
    try:
        home = root.resolve(strict=True)
        found = (home / path).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"there is no image {path!r} in {root}") from error
    if not found.is_relative_to(home):
        raise ValueError(f"{path!r} leads out of {root}; images.root may name another folder")
    return found
