"""What is made of a step's logits: sampled tokens, scores of a text, the experts that were chosen.

A token is sampled in vLLM's order: penalties, temperature, min-p, top-k, top-p. Invariant: its
logprob is that of the distribution from which it was drawn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.wire.expert_gates import expert_gates, layers_of
from buffer.wire.sampling import SampleParams
from producer_workers.engines.base import EngineError, FinishReason, GenerationError, Scores


class SampledToken(NamedTuple):
    """A token id, its natural log probability, and the ids that it was sampled from (None: all)."""

    token: int
    logprob: float
    kept: Tensor | None = None


def sample(
    logits: Tensor,
    params: SampleParams,
    prompt: Sequence[int],
    response: Sequence[int],
    stop_ids: Collection[int],
    generator: torch.Generator,
) -> SampledToken:
    """Sample one of float[V]; none of `stop_ids` before `min_tokens` others."""
    logits = _penalize(logits.float(), params, prompt, response)
    if len(response) < params.min_tokens:
        logits[list(stop_ids)] = -torch.inf
    if params.temperature == 0:
        logprobs = torch.log_softmax(logits, -1)
        token = int(logprobs.argmax())
        return SampledToken(token, float(logprobs[token]))
    logprobs = torch.log_softmax(_cut(logits / params.temperature, params), -1)
    token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    kept = logprobs.isfinite()
    is_whole = bool(kept.all()) and not params.always_cuts()
    return SampledToken(token, float(logprobs[token]), None if is_whole else kept.nonzero()[:, 0])


def _penalize(
    logits: Tensor, params: SampleParams, prompt: Sequence[int], response: Sequence[int]
) -> Tensor:
    """Apply the penalties. Only repetition counts the prompt."""
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *response}), device=logits.device)
        worth = logits[seen]
        logits[seen] = torch.where(
            worth > 0, worth / params.repetition_penalty, worth * params.repetition_penalty
        )
    if response and (params.presence_penalty or params.frequency_penalty):
        counts = torch.bincount(torch.tensor(response, device=logits.device), minlength=len(logits))
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return logits


def _cut(logits: Tensor, params: SampleParams) -> Tensor:
    """Keep the `top_k` likeliest tokens, of these the fewest that sum to `top_p`.

    And, of all tokens, those at least `min_p` times as likely as the likeliest.
    """
    if 0 < params.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    if params.min_p:
        likeliest = logits.max() + math.log(params.min_p)
        logits = logits.masked_fill(logits < likeliest, -torch.inf)
    if params.top_p < 1.0:
        ordered, indices = torch.softmax(logits, -1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= params.top_p
        logits = logits.index_fill(0, indices[beyond], -torch.inf)
    return logits


class Scoring:
    """The scores of a text so far; each step reads 512 of its tokens."""

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

    def read_on(self, model: Any, device: str) -> None:
        """Read the next part with a causal model."""
        if self.cache is None:
            self.forget()
        first = self.known + 1
        part = self.ids[self.known : self.known + 512]
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
            logprobs = torch.log_softmax(output.logits[0, : len(targets)].float(), -1)
            column = torch.tensor(targets, device=logprobs.device)[:, None]
            chosen = logprobs.gather(1, column)[:, 0]
            best = logprobs.topk(self._top_k)
            self._parts.append((chosen.cpu(), best.indices.int().cpu(), best.values.cpu()))
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


class RoutingRecorder:
    """Hooks on the gates of `model`. Raises EngineError if no gate reports its choices.

    The trainer repeats the choices (arXiv:2510.11370). Invariant: a row is from the forward pass
    that sampled the next token. Where tokens are read again, by other weights or in the prefill of
    a continued rollout, the existing rows stay.
    """

    def __init__(self, model: Any) -> None:
        self._layers = layers_of(model)
        self._chosen = dict[int, torch.Tensor]()
        for layer, gate in expert_gates(model).items():
            gate.register_forward_hook(partial(self._record, layer))
        with torch.inference_mode():
            model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
        if not self._chosen:
            hint = "set [engine] routed_experts only for a mixture of experts"
            raise EngineError(
                f"{type(model).__name__} has no gates that report the chosen experts", hint=hint
            )

    def take(self) -> NDArray[np.int16]:
        """Return the last forward pass's experts, int16[tokens, layers, top_k], of one request."""
        tokens, top_k = next(iter(self._chosen.values())).shape
        rows = np.zeros((tokens, self._layers, top_k), "<i2")
        for layer, chosen in self._chosen.items():
            rows[:, layer] = chosen.cpu().numpy()
        return rows

    def _record(self, layer: int, gate: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point():
            self._chosen[layer] = output[2]


class RoutedTokens:
    def __init__(self) -> None:
        self._parts: list[NDArray[np.int16]] = []
        self._known = 0

    def add(self, first: int, rows: NDArray[np.int16]) -> None:
        """Add the rows of tokens from number `first` on, except known ones."""
        new = rows[self._known - first :]
        self._parts.append(new)
        self._known += len(new)

    def whole(self) -> NDArray[np.int16] | None:
        """Return int16[P + R - 1, layers, top_k]; None if nothing was recorded."""
        return np.concatenate(self._parts) if self._parts else None
