"""Records that name images, as problems whose messages show them.

What a record names is `images` (one, or a list), in order, or stands in the messages themselves, as
chat APIs write it. The messages show them as parts {"type": "image"}, which chat templates turn
into the model's placeholder; where they have none, as "<image>" in a text; else in front of what
the user says first.

What a row may say of an image: a path, a data: URI, bytes, or a picture that some library has
unpacked.

Rows are somebody else's. So nothing is fetched for them, and no path leads out of the folder of the
images.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from buffer.config.dataset import ImagesSection
from buffer.errors import MediaError
from producer_workers.datasets.dataset import Problem
from producer_workers.datasets.records import ToProblem
from producer_workers.images.image_file import check_image, png_of

if TYPE_CHECKING:
    from PIL.Image import Image


SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
INLINE = re.compile(r"data:image/[\w.+-]+;base64,")


def find_image(value: Any, root: Path, limits: ImagesSection) -> Path | bytes:
    """The file or the bytes that `value` means. Raises ValueError with the reason.

    Understood: a path (from `root` on, or absolute), file://…, data:image/…;base64,…, bytes, a
    picture of Pillow, and {"bytes": …, "path": …} as `datasets` writes images.
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
        raise ValueError(
            f"nothing is fetched from {found[1]}: URIs; store the image as a file, and name that"
        )
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


Messages = list[dict[str, Any]]
MARK = "<image>"
NAMES = ("images", "image")
SHOWN = {"type": "image"}


class ImageRecords:
    """`to_problem`, and then the images: each is found and looked at, so that a bad one fails when
    the file is opened.

    `folder`: where paths begin, unless the section names a root. What is wrong is a ValueError.
    """

    def __init__(self, to_problem: ToProblem, limits: ImagesSection, folder: Path) -> None:
        self._to_problem = to_problem
        self._limits = limits
        self._root = limits.root or folder

    def __call__(self, record: Any) -> Problem:
        problem = self._to_problem(record)
        named = [value for name in NAMES for value in _listed(problem.extra.get(name))]
        messages, values = show_images(problem.messages, named)
        if len(values) > self._limits.max_images:
            raise ValueError(
                f"it shows {len(values)} images, over max_images = {self._limits.max_images}"
            )
        images = [self._find(place, value) for place, value in enumerate(values)]
        extra = {name: value for name, value in problem.extra.items() if name not in NAMES}
        return problem.model_copy(update={"messages": messages, "images": images, "extra": extra})

    def _find(self, place: int, value: Any) -> Path | bytes:
        what = f"image {place} ({value[:100]!r})" if isinstance(value, str) else f"image {place}"
        try:
            found = find_image(value, self._root, self._limits)
            check_image(found, self._limits)
        except MediaError as error:
            raise ValueError(f"{what}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error
        return found


def without_images(to_problem: ToProblem) -> ToProblem:
    """`to_problem` for a data set that was given no images: a message that shows one would be half
    a prompt.
    """

    def to_text_problem(record: Any) -> Problem:
        problem = to_problem(record)
        if any(_is_image(part) for part in _parts(problem.messages)):
            raise ValueError(
                "a message shows an image; say [tasks.<name>.dataset.images] where that is wanted"
            )
        return problem

    return to_text_problem


def show_images(messages: Messages, named: list[Any]) -> tuple[Messages, list[Any]]:
    """(messages with a part SHOWN for each image, what each of these is). Raises ValueError where
    they do not fit.
    """
    if any(_is_image(part) for part in _parts(messages)):
        return _show_parts(messages, named)
    marks = sum(part.get("text", "").count(MARK) for part in _parts(messages)) if named else 0
    if marks not in (0, len(named)):
        raise ValueError(f'the text has {marks} "{MARK}", but {len(named)} images are named')
    if marks:
        return [message | {"content": _at_marks(message["content"])} for message in messages], named
    return _show_first(messages, named), named


def _show_parts(messages: Messages, named: list[Any]) -> tuple[Messages, list[Any]]:
    own = [_source(part) for part in _parts(messages) if _is_image(part)]
    if own.count(None) != len(named):
        raise ValueError(
            f"the messages show {own.count(None)} images by place, but {len(named)} are named"
        )
    rest = iter(named)
    values = [next(rest) if source is None else source for source in own]
    shown = [
        message | {"content": [SHOWN if _is_image(part) else part for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    return shown, values


def _show_first(messages: Messages, named: list[Any]) -> Messages:
    place = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if not named:
        return messages
    if place is None:
        raise ValueError("no message of the user could show the images")
    content = messages[place]["content"]
    said = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [
        message | {"content": [SHOWN] * len(named) + said} if n == place else message
        for n, message in enumerate(messages)
    ]


def _at_marks(content: Any) -> Any:
    """The content with an image wherever its texts have a mark."""
    parts = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        for n, text in enumerate(str(part.get("text", "")).split(MARK)):
            parts += [SHOWN] * (n > 0) + ([part | {"text": text}] if text else [])
    return parts if SHOWN in parts else content


def _parts(messages: Messages) -> Iterator[dict[str, Any]]:
    """All that messages say, a text as a part like those of lists."""
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            yield {"type": "text", "text": content}
        elif isinstance(content, list):
            yield from (part for part in content if isinstance(part, dict))


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _source(part: dict[str, Any]) -> Any:
    """What a part itself says of its image; None where only its place counts."""
    value = part.get("image_url", part.get("image"))
    return value.get("url") if isinstance(value, dict) and "url" in value else value


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
