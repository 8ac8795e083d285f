"""Make prompts with images as the very token ids that the model will see.

An image takes as many tokens as the model's processor decides, which depends on its size. So the
processor runs once, where the prompt is made, and the ids are stored expanded; samplers and
trainers check that their own count agrees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ModelError
from buffer.redis.media_folder import MediaFolder
from buffer.wire.rollout import MediaRef
from producer_workers.config.dataset import ImagesSection
from producer_workers.datasets.dataset import Problem
from producer_workers.images import ImageFile, find_runs, load_image


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image in a prompt: its file, its tokens, and its patches in time, height and width.

    `grid_thw` is None where the model does not count patches.
    """

    file: ImageFile
    tokens: int
    grid_thw: list[int] | None


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """int32[P] prompt ids, placeholders expanded, and the images in their order."""

    ids: NDArray[np.int32]
    images: list[ShownImage]

    @property
    def seed(self) -> bytes:
        """Return bytes that differ between any two prompts."""
        digests = [blake2b(image.file.data, digest_size=8).digest() for image in self.images]
        return b"".join([self.ids.tobytes(), *digests])


class ImagePrompts:
    """Makes the prompts of one task and keeps their images as files of their groups."""

    def __init__(
        self,
        model: str,
        limits: ImagesSection,
        media: MediaFolder,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._processor = load_processor(model)
        self._template_kwargs = template_kwargs or {}
        self._limits = limits
        self._media = media

    def encode(self, problem: Problem, tools: list[dict[str, Any]] | None) -> ImagePrompt:
        """Return the prompt of a problem.

        Raises MediaError for a broken image, ValueError for one that the model's processor refuses.
        """
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
        return ImagePrompt(
            ids, [ShownImage(*image) for image in zip(files, tokens, grids, strict=True)]
        )

    def _tokens(self, ids: NDArray[np.int32], grids: list[list[int] | None]) -> list[int]:
        """Return the tokens of each image, in proportion to its patches.

        They are equal where the model does not count patches.
        """
        image_token = int(self._processor.image_token_id)
        total = int(np.count_nonzero(ids == image_token))
        sizes = [int(np.prod(grid)) if grid else 1 for grid in grids]
        tokens = [total * size // max(sum(sizes), 1) for size in sizes]
        if sum(tokens) != total:
            raise ValueError(f"{total} tokens do not divide by the sizes of {len(sizes)} images")
        find_runs(ids, image_token, tokens)
        return tokens

    def keep(self, gid: str, prompt: ImagePrompt) -> list[MediaRef]:
        """Write the images into the run's folder, as files of the group.

        Drawn again, they are the same files.
        """
        return [
            MediaRef(
                kind="image",
                uri=self._media.put(gid, f"image-{number}.{image.file.suffix}", image.file.data),
                tokens=image.tokens,
                grid_thw=image.grid_thw,
            )
            for number, image in enumerate(prompt.images)
        ]


def load_processor(model: str) -> Any:
    """Load the processor (tokenizer and image processor) of a model folder.

    Raises ModelError for a model without images.
    """
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
