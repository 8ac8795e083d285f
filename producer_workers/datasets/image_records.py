"""Turn records that name images into problems whose messages show them.

A record names its images in `images`, or within its messages, as chat APIs do. They appear as parts
{"type": "image"}; without these, at "<image>" in a text; else in front of the user's first message.
Rows may come from anyone, so no image is fetched, and no path leads out of the images' folder.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ModelError
from buffer.wire.rollout import MediaRef
from producer_workers.config.dataset import ImagesSection
from producer_workers.datasets.dataset import EncodedPrompt, Problem, ShownImage
from producer_workers.datasets.records import ToProblem, is_image, parts_of
from producer_workers.datasets.row_values import is_picture
from producer_workers.images import (
    ImageError,
    ImageFolder,
    check_image,
    find_runs,
    load_image,
    png_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image


Messages = list[dict[str, Any]]

MARK = "<image>"
NAMES = ("images", "image")
SHOWN = {"type": "image"}
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
INLINE = re.compile(r"data:image/[\w.+-]+;base64,")


def find_image(value: Any, root: Path, limits: ImagesSection) -> Path | bytes:
    """Return the file or the bytes that `value` names. Raises ValueError with the reason.

    `value`: a path below `root` or absolute, file://…, data:image/…;base64,…, bytes, a Pillow
    picture, or {"bytes": …, "path": …} as `datasets` writes images.
    """
    match value:
        case bytes() if value:
            return value
        case str() if value:
            return _of_text(value, root, limits)
        case Mapping() if value.get("bytes") or value.get("path"):
            return find_image(value.get("bytes") or value["path"], root, limits)
        case _ if is_picture(value):
            return png_of(cast("Image", value))
    raise ValueError(f"an image is a {type(value).__name__}; expected a path, a data: URI or bytes")


def _of_text(value: str, root: Path, limits: ImagesSection) -> Path | bytes:
    if found := INLINE.match(value):
        text = value[found.end() :]
        if len(text) > limits.max_bytes * 4 / 3 + 4:
            raise ValueError(f"the data: URI holds more than max_bytes = {limits.max_bytes}")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the data: URI is not valid base64: {error}") from error
    if value.startswith("file://"):
        return _inside(value.removeprefix("file://"), root)
    if found := SCHEME.match(value):
        raise ValueError(
            f"{found[1]}: URIs are not fetched; store the image as a file, and name its path"
        )
    return _inside(value, root)


def _inside(path: str, root: Path) -> Path:
    try:
        home = root.resolve(strict=True)
        found = (home / path).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"there is no image {path!r} in {root}") from error
    if not found.is_relative_to(home):
        raise ValueError(f"{path!r} leads out of {root}; images.root may name another folder")
    return found


class ImageRecords:
    """Applies `to_problem`, then finds and checks the images when the file is opened (ValueError).

    Paths begin at `folder`, unless the section names a root.
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
        images = [self._find(number, value) for number, value in enumerate(values)]
        extra = {name: value for name, value in problem.extra.items() if name not in NAMES}
        return problem.model_copy(update={"messages": messages, "images": images, "extra": extra})

    def _find(self, number: int, value: Any) -> Path | bytes:
        what = f"image {number} ({value[:100]!r})" if isinstance(value, str) else f"image {number}"
        try:
            found = find_image(value, self._root, self._limits)
            check_image(found, self._limits)
        except (ImageError, ValueError) as error:
            raise ValueError(f"{what}: {error}") from error
        return found


def show_images(messages: Messages, named: list[Any]) -> tuple[Messages, list[Any]]:
    """Return the messages with a part SHOWN for each image, and the images. Raises ValueError."""
    if any(is_image(part) for part in parts_of(messages)):
        return _show_parts(messages, named)
    marks = sum(part.get("text", "").count(MARK) for part in parts_of(messages)) if named else 0
    if marks not in (0, len(named)):
        raise ValueError(f'the text has {marks} "{MARK}", but {len(named)} images are named')
    if marks:
        shown = [{**message, "content": _at_marks(message["content"])} for message in messages]
        return shown, named
    return (_show_first(messages, named) if named else messages), named


def _show_parts(messages: Messages, named: list[Any]) -> tuple[Messages, list[Any]]:
    own = [_source(part) for part in parts_of(messages) if is_image(part)]
    if own.count(None) != len(named):
        raise ValueError(
            f"the messages show {own.count(None)} images by position, but {len(named)} are named"
        )
    rest = iter(named)
    values = [next(rest) if source is None else source for source in own]
    shown = [
        {**message, "content": [SHOWN if is_image(part) else part for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    return shown, values


def _show_first(messages: Messages, named: list[Any]) -> Messages:
    first = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError("there is no message of the user to show the images in")
    content = messages[first]["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    shown = {**messages[first], "content": [SHOWN] * len(named) + parts}
    return [*messages[:first], shown, *messages[first + 1 :]]


def _at_marks(content: Any) -> Any:
    """Return the content with an image wherever its texts have a mark."""
    parts = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        for n, text in enumerate(str(part.get("text", "")).split(MARK)):
            parts += [SHOWN] * (n > 0) + ([part | {"text": text}] if text else [])
    return parts if SHOWN in parts else content


def _source(part: dict[str, Any]) -> Any:
    """Return what a part names as its image; None where only its position counts."""
    value = part.get("image_url", part.get("image"))
    return value.get("url") if isinstance(value, dict) and "url" in value else value


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


class ImagePrompts:
    """Makes the prompts of one task and keeps their images in the folder of the run."""

    def __init__(
        self,
        model: str,
        limits: ImagesSection,
        folder: ImageFolder,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._processor = load_processor(model)
        self._template_kwargs = template_kwargs or {}
        self._limits = limits
        self._folder = folder

    def encode(self, problem: Problem, tools: list[dict[str, Any]] | None) -> EncodedPrompt:
        """Return the prompt. Raises ImageError, and ValueError of the model's processor."""
        files = [load_image(source, self._limits) for source in problem.images]
        text = self._processor.apply_chat_template(
            problem.messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=True,
            **self._template_kwargs,
        )
        pixels = [file.pixels for file in files]
        # The template has already written the special tokens.
        made = self._processor(text=[text], images=pixels or None, add_special_tokens=False)
        ids = np.array(made["input_ids"][0], "<i4")
        counted: list[list[int] | None] = [
            [int(n) for n in grid] for grid in made.get("image_grid_thw", ())
        ]
        grids = counted or [None] * len(files)
        tokens = self._tokens(ids, grids)
        return EncodedPrompt(
            ids, [ShownImage(*image) for image in zip(files, tokens, grids, strict=True)]
        )

    def _tokens(self, ids: NDArray[np.int32], grids: list[list[int] | None]) -> list[int]:
        """Return the tokens of each image, in proportion to its patches if they are known."""
        image_token = int(self._processor.image_token_id)
        total = int(np.count_nonzero(ids == image_token))
        sizes = [int(np.prod(grid)) if grid else 1 for grid in grids]
        tokens = [total * size // max(sum(sizes), 1) for size in sizes]
        if sum(tokens) != total:
            raise ValueError(f"{total} tokens do not divide by the sizes of {len(sizes)} images")
        find_runs(ids, image_token, tokens)
        return tokens

    def keep(self, prompt: EncodedPrompt) -> list[MediaRef]:
        """Write the images into the run's folder, unless an earlier draw has, and name them."""
        return [
            MediaRef(
                kind="image",
                uri=self._folder.put(image.file.data, image.file.suffix),
                tokens=image.tokens,
                grid_thw=image.grid_thw,
            )
            for image in prompt.images
        ]


def load_processor(model: str) -> Any:
    """Load the processor (tokenizer and image processor) of a model folder. Raises ModelError."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model)
    except (OSError, ValueError, ImportError) as error:
        hint = "images need a vision-language model, with the files of its processor"
        raise ModelError(f"no processor in {model!r}: {error}", hint=hint) from error
    if getattr(processor, "image_token_id", None) is None:
        raise ModelError(
            f"the model {model!r} has no image token", hint="images need a vision-language model"
        )
    return processor
