"""Prompts with images, by the processor of the model: the very token ids that the model will see.

An image takes as many tokens as the processor says, which depends on its size. So it is asked once,
where the prompt is made, and the ids are stored expanded; whoever samples or trains checks that its
own count agrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.config.dataset import ImagesSection
from buffer.errors import ModelError
from buffer.model.rollout import MediaRef
from buffer.store.media_folder import MediaFolder
from producer_workers.datasets.dataset import Problem
from producer_workers.images.image_file import ImageFile, load_image
from producer_workers.images.image_reader import find_runs


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image in a prompt: its file, its tokens, its patches in time, height and width where the
    model counts them.
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
        """What tells this prompt from every other one."""
        digests = [blake2b(image.file.data, digest_size=8).digest() for image in self.images]
        return b"".join([self.ids.tobytes(), *digests])


class ImagePrompts:
    """Makes the prompts of one task and keeps their images as files of their groups."""

    def __init__(self, model: str, limits: ImagesSection, media: MediaFolder) -> None:
        self._processor = load_processor(model)
        self._limits = limits
        self._media = media

    def encode(self, problem: Problem, tools: list[dict[str, Any]] | None) -> ImagePrompt:
        """Raises MediaError for an image that is broken, ValueError where the model's processor
        takes none like it.
        """
        files = [load_image(source, self._limits) for source in problem.images]
        text = self._processor.apply_chat_template(
            problem.messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        pixels = [file.pixels for file in files]
        # the template has written the special tokens
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
        """Tokens of each image: as its patches, or the same for all where the model does not count
        these.
        """
        image_token = int(self._processor.image_token_id)
        total = int(np.count_nonzero(ids == image_token))
        sizes = [int(np.prod(grid)) if grid else 1 for grid in grids]
        tokens = [total * size // max(sum(sizes), 1) for size in sizes]
        if sum(tokens) != total:
            raise ValueError(f"{len(sizes)} images do not share {total} tokens as their sizes say")
        find_runs(ids, image_token, tokens)
        return tokens

    def keep(self, gid: str, prompt: ImagePrompt) -> list[MediaRef]:
        """Write the images into the run's folder, as files of the group; drawn again, they are the
        same.
        """
        return [
            MediaRef(
                kind="image",
                uri=self._media.put(gid, f"image-{place}.{image.file.suffix}", image.file.data),
                tokens=image.tokens,
                grid_thw=image.grid_thw,
            )
            for place, image in enumerate(prompt.images)
        ]


def load_processor(model: str) -> Any:
    """The processor (tokenizer and image processor) of a model folder. Raises ModelError for one
    that sees nothing.
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
