"""Give vLLM the images of a prompt, and check that it reads the prompt's own tokens.

The producer has already written all placeholders of each image, and vLLM's processor would write
them again. So vLLM gets the prompt up to its last image with one placeholder per image; its result
must equal the prompt's beginning, token for token. All requests of a group share the computation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.wire.rollout import MediaRef
from producer_workers.engines.base import GenerationError, GroupImages
from producer_workers.engines.model_folder import read_config
from producer_workers.images import ImageFolder, collapse, find_runs

TOKEN_NAMES = ("image_token_id", "image_token_index")  # of the placeholder, in config.json


class VllmImages(GroupImages):
    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._folder: ImageFolder | None = None
        self._shown: dict[str, Sequence[MediaRef]] = {}
        self._heads: dict[tuple[str, bytes], asyncio.Task[dict[str, Any]]] = {}

    @cached_property
    def _token(self) -> int | None:
        return image_token(self._model_dir)

    def read_from(self, folder: ImageFolder) -> None:
        self._folder = folder

    def show(self, gid: str, refs: Sequence[MediaRef]) -> None:
        self.forget(gid)
        self._shown[gid] = refs

    def forget(self, gid: str) -> None:
        self._shown.pop(gid, None)
        for key in [key for key in self._heads if key[0] == gid]:
            self._heads.pop(key).cancel()

    async def prompt(
        self, llm: Any, request_id: str, prompt_ids: NDArray[np.int32]
    ) -> dict[str, Any] | None:
        """Return vLLM's input of a request with images, or None. May raise ImageError."""
        gid = request_id.partition("/")[0]
        refs = self._shown.get(gid)
        if not refs:
            return None
        if self._token is None:
            raise GenerationError(f"{gid} shows images, but {self._model_dir} is a text model")
        try:
            runs = find_runs(prompt_ids, self._token, [ref.tokens for ref in refs])
        except ValueError as error:
            raise GenerationError(
                f"the prompt of {gid} does not fit its images: {error}"
            ) from error
        ids = prompt_ids[: runs[-1].stop]
        key = gid, ids.tobytes()
        if key not in self._heads:
            self._heads[key] = asyncio.create_task(self._head(llm, gid, ids, runs, refs))
        # Shielded, since one request of the group may be cancelled alone.
        head = await asyncio.shield(self._heads[key])
        return {**head, "prompt_token_ids": prompt_ids.tolist()}

    async def _head(
        self,
        llm: Any,
        gid: str,
        ids: NDArray[np.int32],
        runs: list[slice],
        refs: Sequence[MediaRef],
    ) -> dict[str, Any]:
        """Return vLLM's input up to the last image: ids, pixels and their positions."""
        assert self._folder is not None
        images = [await asyncio.to_thread(self._folder.read, ref) for ref in refs]
        prompt = {
            "prompt_token_ids": collapse(ids, runs),
            "multi_modal_data": {"image": [image.pixels for image in images]},
            "multi_modal_uuids": {"image": [image.digest for image in images]},
        }
        (head,) = await llm.renderer.render_cmpl_async([prompt])
        if not np.array_equal(head["prompt_token_ids"], ids):
            raise GenerationError(
                f"vLLM reads other tokens for the images of {gid} than its prompt has",
                hint="its processor must make one run of placeholders for each image, "
                "as many as the model's own",
            )
        return {name: value for name, value in head.items() if name != "arrival_time"}


def image_token(model_dir: Path) -> int | None:
    config = read_config(model_dir)
    return next((int(config[name]) for name in TOKEN_NAMES if config.get(name) is not None), None)


def image_arguments(model_dir: Path) -> dict[str, Any]:
    if image_token(model_dir) is None:
        return {}
    # `VllmImages` keeps what a group shares. vLLM's own cache has two sides, which a weight update
    # empties one after the other: by its source (0.32; not observed), a request in between would
    # look up an entry that is already gone.
    arguments: dict[str, Any] = {"mm_processor_cache_gb": 0}
    if find_spec("blake3") is None:
        arguments["mm_hasher_algorithm"] = "sha256"
    return arguments
