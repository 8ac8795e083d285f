"""Score a text in parts: the logits of all of its tokens at once would fill the memory."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from producer_workers.engines.base import FinishReason, GenerationError, Scores

CHUNK = 512  # tokens of a text that a step reads


class Scoring:
    """The scores of a text so far; each step reads `CHUNK` of its tokens."""

    def __init__(self, request_id: str, ids: list[int], start: int, top_k: int) -> None:
        self.group = request_id.partition("/")[0]
        self.ids = ids
        self.start = start
        self._top_k = top_k
        self.cache: Any = None
        self.error: Exception | None = None
        self.finish_reason: FinishReason | None = None
        self.ended: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self.forget()

    def forget(self) -> None:
        self.known = 0
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def _add(self, logits: Tensor, targets: list[int]) -> None:
        """Add the scores of tokens, of which float[n, V] are the logits."""
        logprobs = torch.log_softmax(logits.float(), -1)
        chosen = logprobs.gather(1, torch.tensor(targets, device=logits.device)[:, None])[:, 0]
        best = logprobs.topk(self._top_k)
        self._parts.append((chosen.cpu(), best.indices.int().cpu(), best.values.cpu()))

    def read_on(self, model: Any, device: str) -> None:
        """Read the next part with a causal model."""
        if self.cache is None:
            self.forget()
        first = self.known + 1
        part = self.ids[self.known : self.known + CHUNK]
        self.known += len(part)
        # the logits after a token are those of the next one
        wanted = max(first, self.start)
        targets = self.ids[wanted : self.known + 1]
        output = model(
            torch.tensor([part], device=device),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=max(1, self.known + 1 - wanted),
        )
        self.cache = output.past_key_values
        if targets:
            self._add(output.logits[0, : len(targets)], targets)
        if self.known == len(self.ids):
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = self.finish_reason or reason

    def settle(self) -> None:
        if self.ended.done():
            return
        if self.error or self.finish_reason == "abort":
            why = repr(self.error) if self.error else "it was aborted"
            self.ended.set_exception(GenerationError(f"a text was not scored: {why}"))
        elif self.finish_reason:
            scores = [torch.cat(parts).numpy() for parts in zip(*self._parts, strict=True)]
            self.ended.set_result(Scores(*scores))
