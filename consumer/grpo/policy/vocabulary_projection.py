"""Log-probabilities of tokens from hidden states, without logits of [tokens, vocabulary] in memory.

The projection runs in chunks of tokens; the backward pass computes the logits of each chunk again.
All logits of 8,192 tokens and 151,936 words take 4.6 GiB in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

CHUNK_BYTES = 256 * 1024 * 1024  # of a chunk's float32 logits; a backward pass holds at most four

LOWEST = -1e18  # logit of a word that could not be sampled: finite, so that 0 times it is 0


class SampledFrom(NamedTuple):
    """The words that each token was sampled from. Its softmax is over these alone.

    `counts`: int64[N]; 0: all words. `ids`: int64[n], one token's words after another's. `starts`:
    int64[N + 1], where those of each token begin, on the CPU, so that nothing waits for a device.
    """

    counts: Tensor
    ids: Tensor
    starts: NDArray[np.int64]

    def restrict_(self, logits: Tensor, rows: slice) -> Tensor:
        """Set the logits of other words to `LOWEST`, float32[n, vocabulary] of some tokens."""
        first, last = (int(self.starts[min(n, len(self.counts))]) for n in (rows.start, rows.stop))
        if first == last:
            return logits
        counts, ids = self.counts[rows], self.ids[first:last]
        row = torch.arange(len(counts), device=counts.device)
        row = row.repeat_interleave(counts, output_size=last - first)
        kept = logits[row, ids]
        logits.masked_fill_((counts > 0)[:, None], LOWEST)
        logits[row, ids] = kept
        return logits


class TokenLogprobs(NamedTuple):
    """One value per response token, float32[N] each; the entropy is in nats."""

    logprobs: Tensor
    entropy: Tensor
    collision: Tensor | None = None  # sum of squared probabilities; empty unless asked for
    others: Tensor | None = None  # logprobs of other tokens in its place, float32[N, K]


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Maps products to logits: scale, cap (x becomes c * tanh(x / c)), then divide."""

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def apply_(self, products: Tensor) -> Tensor:
        if self.cap is not None:
            products.mul_(self.scale / self.cap).tanh_()
        return products.mul_((self.cap or self.scale) / self.temperature)

    def gradient_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the logits' `gradient` into that of the products, in place; overwrite `logits`."""
        if self.cap is not None:
            # the derivative of tanh is 1 - tanh^2
            tanh = logits.mul_(self.temperature / self.cap).clamp_(-1, 1)  # `LOWEST` is beyond
            gradient.mul_(tanh.square_().neg_().add_(1.0))
        return gradient.mul_(self.scale / self.temperature)


def project(
    states: Tensor,
    head: nn.Module,
    targets: Tensor,
    transform: LogitTransform,
    *,
    fp32_logits: bool = False,
    entropy_gradient: bool = True,
    collision: bool = False,
    others: Tensor | None = None,
    sampled_from: SampledFrom | None = None,
) -> TokenLogprobs:
    """Return log-probability of each target and entropy of its distribution, in nats.

    `states`: [N, width]. `head`: linear, with a `weight` of [vocabulary, width]. `targets`:
    int64[N]. `others`: further tokens whose log-probability is asked for, int64[N, K]; -inf where
    they are not in `sampled_from`. Under autocast, only the products are computed in its type, the
    rest in float32. `fp32_logits`: factors are rounded to that type, their products are not.
    """
    weight: Any = head.weight
    bias: Any = getattr(head, "bias", None)
    device = states.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else weight.dtype
    with torch.autocast(device, enabled=False):
        apply: Any = _Projection.apply
        options = _Options(transform, dtype, fp32_logits, entropy_gradient, collision, sampled_from)
        tokens = targets[:, None] if others is None else torch.cat([targets[:, None], others], 1)
        logprobs, entropy, squares = apply(states, weight, bias, tokens, options)
    rest = None if others is None else logprobs[:, 1:]
    if rest is not None and sampled_from is not None:
        rest = rest.masked_fill(rest < LOWEST / 2, -torch.inf)
    return TokenLogprobs(logprobs[:, 0], entropy, squares, rest)


def _chunks(count: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return (slice(start, start + size) for start in range(0, count, size))


class _Options(NamedTuple):
    transform: LogitTransform
    dtype: torch.dtype
    fp32_logits: bool
    entropy_gradient: bool
    collision: bool
    sampled_from: SampledFrom | None


class _Table:
    """The output embedding in the type of the products, [vocabulary, width]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, options: _Options) -> None:
        self.weight = weight.to(options.dtype)
        self._bias = None if bias is None else bias.to(options.dtype)
        self._transform = options.transform
        self._sampled_from = options.sampled_from
        self._is_exact = options.fp32_logits and options.dtype != torch.float32

    def logits(self, states: Tensor, rows: slice) -> Tensor:
        """Return those of some rows, float32[n, vocabulary], in memory of their own."""
        states = states[rows].to(self.weight.dtype)
        if not self._is_exact:
            products = nn.functional.linear(states, self.weight, self._bias).float()
        else:
            if states.is_cuda:
                products = torch.mm(states, self.weight.T, out_dtype=torch.float32)
            else:
                products = states.float() @ self.weight.float().T
            if self._bias is not None:
                products += self._bias
        logits = self._transform.apply_(products)
        return self._sampled_from.restrict_(logits, rows) if self._sampled_from else logits


class _Projection(torch.autograd.Function):
    """Computes `project` as one node of the graph, which keeps no tensor of a chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        table = _Table(weight, bias, options)
        logprobs = states.new_empty(targets.shape, dtype=torch.float32)
        entropy = logprobs.new_empty(len(states))
        total = torch.empty_like(entropy)
        collision = logprobs.new_empty(len(states) if options.collision else 0)
        for rows in _chunks(len(states), len(weight)):
            logits = table.logits(states, rows)
            total[rows] = logits.logsumexp(-1)
            distribution = logits.sub_(total[rows, None])
            logprobs[rows] = distribution.gather(1, targets[rows])
            chances = distribution.exp()
            if options.collision:
                collision[rows] = torch.linalg.vecdot(chances, chances)
            entropy[rows] = -chances.mul_(distribution).sum(-1)
        ctx.save_for_backward(states, weight, bias, targets, total, entropy)
        ctx.options = options
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropy, collision)
        else:
            ctx.mark_non_differentiable(collision)
        return logprobs, entropy, collision

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor, _: Tensor) -> Any:
        states, weight, bias, targets, total, entropy = ctx.saved_tensors
        options = ctx.options
        table = _Table(weight, bias, options)
        # float32, which autograd rounds
        needed = zip((states, weight, bias), ctx.needs_input_grad, strict=False)
        by_state, by_weight, by_bias = (
            torch.zeros_like(each, dtype=torch.float32) if is_needed and each is not None else None
            for each, is_needed in needed
        )
        for rows in _chunks(len(states), len(weight)):
            logits = table.logits(states, rows)
            by_logit = _logit_gradient(
                logits,
                targets[rows],
                total[rows, None],
                by_logprob[rows],
                (entropy[rows, None], by_entropy[rows, None]) if options.entropy_gradient else None,
            )
            by_product = options.transform.gradient_(by_logit, logits)
            if by_bias is not None:
                by_bias += by_product.sum(0)
            by_product = by_product.to(options.dtype)
            if by_state is not None:
                by_state[rows] = by_product @ table.weight
            if by_weight is not None:
                own = states[rows].to(options.dtype)
                if own.dtype == by_weight.dtype:
                    by_weight.addmm_(by_product.T, own)  # without a copy of the total
                else:
                    by_weight += by_product.T @ own
        return by_state, by_weight, by_bias, None, None


def _logit_gradient(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    by_logprob: Tensor,
    by_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the gradient of the logits of a chunk, float32[n, vocabulary].

    `targets`, `by_logprob`: [n, M]. `total`: log of the sum of exponentials, [n, 1]. `by_entropy`:
    the entropy and its gradient, [n, 1] each. With the probability p of a word:

        d logprob / d logit = (1 for the target, 0 for another word) - p
        d entropy / d logit = -p * (log p + entropy)
    """
    factor = by_logprob.sum(1, keepdim=True)
    if by_entropy is not None:
        entropy, gradient = by_entropy
        factor = (logits - total).add_(entropy).mul_(gradient).add_(factor)
    by_logit = (logits - total).exp_().mul_(factor).neg_()
    return by_logit.scatter_add_(1, targets, by_logprob)
