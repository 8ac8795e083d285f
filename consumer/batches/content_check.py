"""What a group must contain to be trained: token ids of the model, and logprobs of sampled tokens.

Decoding has checked that columns fit together. These values are valid in a payload, but not in a
train step: an id without an embedding ends the process, and a logprob that no sampler can have
produced gives a gradient that is not finite or drowns all others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.rollouts.group import RolloutGroup

LOWEST_LOGPROB = -50.0
"""A sampler in float32 draws no token below about -25; workers use -9999 or so for "none"."""

HIGHEST_LOGPROB = 0.01
"""Above 0 by no more than rounding: probabilities in place of logprobs are found out."""


def check_content(group: RolloutGroup, vocabulary: int | None) -> None:
    """Raise WireError where a group cannot be trained, with the first wrong token.

    `vocabulary`: the number of token ids of the model; None: ids are not compared with it. Logprobs
    are checked of trained tokens only (mask 1).
    """
    for name in ("prompt_ids", "response_ids"):
        _check_ids(name, getattr(group, name), vocabulary)
    logprobs = group.logprobs
    if not len(logprobs) or _is_plausible(logprobs.min(), logprobs.max()):
        return
    wrong = ~_is_plausible(logprobs, logprobs) & (group.mask > 0)
    if wrong.any():
        position = int(wrong.argmax())
        raise WireError(
            f"the logprob {float(logprobs[position]):g} of trained token {position} is outside of "
            f"{LOWEST_LOGPROB:g} to 0",
            hint="submit the natural log of the probability with which each token was sampled, "
            "and mask 0 for tokens that were not sampled",
        )


def _check_ids(name: str, ids: NDArray[np.int32], vocabulary: int | None) -> None:
    # as unsigned numbers, negative ids are beyond any vocabulary
    bound = 2**31 if vocabulary is None else vocabulary
    unsigned = ids.view(np.uint32)
    if len(ids) and unsigned.max() >= bound:
        position = int((unsigned >= bound).argmax())
        raise WireError(
            f"the token id {int(ids[position])} in {name}, at {position}, is not in the model's "
            f"vocabulary of {bound}",
            hint="let workers and trainer use the same model and tokenizer",
        )


def _is_plausible(low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.bool_]:
    # nan compares as False
    return (low >= LOWEST_LOGPROB) & (high <= HIGHEST_LOGPROB)
