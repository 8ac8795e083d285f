"""Per-token estimates of KL(policy, reference) from the log-probability of the sampled token alone.

With d = logprob - reference (Schulman 2020, "Approximating KL divergence"):
    k1   d                  unbiased, of either sign
    abs  |d|                not an estimate of KL; a robust distance
    k2   d^2 / 2            biased, low variance
    k3   exp(-d) - 1 + d    unbiased, never negative (GRPO, arXiv:2402.03300, equation 4)
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KlKind = Literal["k1", "abs", "k2", "k3"]


def kl_estimate(kind: KlKind, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the estimate of that kind, float32[N] from float32[N].

    It carries the gradient of `logprobs`.
    """
    difference = logprobs - ref_logprobs
    match kind:
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2":
            return difference.square() / 2
    return (-difference).exp() - 1 + difference
