"""Images for vLLM: what it computes beside the tokens of a prompt, and that these are the tokens we
say they are.

vLLM's own processor writes as many placeholders as an image takes. Payloads have them written
already, by the model's processor in the producer. So the prompt is given to vLLM with one
placeholder for each image, up to the last of them, and what it makes of that must be the prompt's
beginning, token for token; the rest follows as it is. Hence a request that goes on behind a
response sees what the first one saw, and all of a group share what was computed.

What vLLM says of one response, as columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from buffer.model.rollout import MediaRef, PolicyVersion, VersionSpan, expert_rows
from producer_workers.engines.base import FinishReason, Generation, GenerationError
from producer_workers.images.image_reader import ImageReader, collapse, find_runs

TOKEN_NAMES = ("image_token_id", "image_token_index")
"""Of the placeholder, in config.json."""


class VllmImages:
    """The images that the groups of one engine show."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._reader: ImageReader | None = None
        self._shown: dict[str, Sequence[MediaRef]] = {}
        self._heads: dict[tuple[str, bytes], asyncio.Task[dict[str, Any]]] = {}

    @cached_property
    def _token(self) -> int | None:
        return image_token(self._model_dir)

    def read_with(self, reader: ImageReader) -> None:
        self._reader = reader

    def show(self, gid: str, media: Sequence[MediaRef]) -> None:
        self.forget(gid)
        self._shown[gid] = media

    def forget(self, gid: str) -> None:
        self._shown.pop(gid, None)
        for key in [key for key in self._heads if key[0] == gid]:
            self._heads.pop(key).cancel()

    async def prompt(
        self, llm: Any, request_id: str, prompt_ids: NDArray[np.int32]
    ) -> dict[str, Any] | None:
        """vLLM's input of a request; None where it shows nothing. Raises GenerationError,
        MediaError.
        """
        gid = request_id.partition("/")[0]
        if not (media := self._shown.get(gid)):
            return None
        runs = self._find_runs(gid, prompt_ids, media)
        ids = prompt_ids[: runs[-1].stop]
        key = gid, ids.tobytes()
        if key not in self._heads:
            self._heads[key] = asyncio.create_task(self._head(llm, gid, ids, runs, media))
        # shielded: one of the group may be cancelled alone
        head = await asyncio.shield(self._heads[key])
        return {**head, "prompt_token_ids": prompt_ids.tolist()}

    def _find_runs(
        self, gid: str, prompt_ids: NDArray[np.int32], media: Sequence[MediaRef]
    ) -> list[slice]:
        if self._token is None:
            raise GenerationError(f"{gid} shows images, and {self._model_dir} is a model of texts")
        try:
            return find_runs(prompt_ids, self._token, [ref.tokens for ref in media])
        except ValueError as error:
            raise GenerationError(
                f"the prompt of {gid} is not that of its images: {error}"
            ) from error

    async def _head(
        self,
        llm: Any,
        gid: str,
        ids: NDArray[np.int32],
        runs: list[slice],
        media: Sequence[MediaRef],
    ) -> dict[str, Any]:
        """vLLM's input up to the last image: ids, pixels, and where these belong."""
        assert self._reader is not None
        images = [await asyncio.to_thread(self._reader.read, ref) for ref in media]
        prompt = {
            "prompt_token_ids": collapse(ids, runs),
            "multi_modal_data": {"image": [image.pixels for image in images]},
            "multi_modal_uuids": {"image": [image.digest for image in images]},
        }
        (head,) = await llm.renderer.render_cmpl_async([prompt])
        if not np.array_equal(head["prompt_token_ids"], ids):
            raise GenerationError(
                f"vLLM reads other tokens for the images of {gid} than its prompt has",
                hint="its processor must make one run of placeholders of each image, as many as the model's own",
            )
        return {name: value for name, value in head.items() if name != "arrival_time"}


def image_token(model_dir: Path) -> int | None:
    """The placeholder of an image; None for a model of texts."""
    config = orjson.loads((model_dir / "config.json").read_bytes())
    return next((int(config[name]) for name in TOKEN_NAMES if config.get(name) is not None), None)


def image_arguments(model_dir: Path) -> dict[str, Any]:
    """AsyncEngineArgs for a model that sees."""
    if image_token(model_dir) is None:
        return {}
    # What a group shares is kept here. vLLM's own cache has two sides, which a weight update
    # empties one after the other; by its source (0.32, not seen), what is asked for in between
    # would be looked for where it is no more.
    arguments: dict[str, Any] = {"mm_processor_cache_gb": 0}
    if find_spec("blake3") is None:
        arguments["mm_hasher_algorithm"] = "sha256"
    return arguments


REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def generation_of(output: Any, submitted: PolicyVersion, prompt: int) -> Generation:
    """Columns of one CompletionOutput behind `prompt` tokens. `submitted`: the version for a vLLM
    without labels per token.
    """
    token_ids = np.asarray(output.token_ids, dtype="<i4")
    logprobs = np.asarray(output.logprobs.logprobs if len(token_ids) else (), dtype="<f4")
    labels = getattr(output, "weight_versions", None)
    if labels is None:
        spans = [_span(str(submitted), 0, len(token_ids))]
    else:
        spans = [_span(label.version, label.start, label.end) for label in labels]
    kept = tuple(span for span in spans if span.length)
    return Generation(
        token_ids, logprobs, kept, REASONS[output.finish_reason], _experts_of(output, prompt)
    )


def _experts_of(output: Any, prompt: int) -> NDArray[np.int16] | None:
    """None where vLLM tells nothing, or made no token. Its rows are uint8 or uint16[P + n - 1,
    layers, top_k].
    """
    tokens = len(output.token_ids)
    given = getattr(output, "routed_experts", None)
    if given is None or not tokens:
        return None
    if len(given) != expert_rows(prompt, tokens):
        raise GenerationError(
            f"vLLM told the experts of {len(given)} tokens of {prompt} and {tokens} after them"
        )
    return np.asarray(given, "<i2")


def _span(label: str, start: int, end: int) -> VersionSpan:
    version = PolicyVersion.parse(label)
    return VersionSpan(start, end - start, version.version, version.lineage)
