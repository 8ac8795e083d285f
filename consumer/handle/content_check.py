"""What a group must contain to be trained: token ids of the model, and logprobs of sampled tokens.

Decoding has checked that columns fit together. These values are valid in a payload, but not in a
train step: an id without an embedding ends the process, and a logprob that no sampler can have
produced gives a gradient that is not finite or drowns all others.
"""

from __future__ import annotations

import numpy as np

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
    bounds = group.bounds
    largest = 2**31 - 1 if vocabulary is None else vocabulary - 1
    if max(bounds.prompt_id, bounds.response_id) > largest:
        _name_id(group, largest)
    if bounds.lowest_logprob >= LOWEST_LOGPROB and bounds.highest_logprob <= HIGHEST_LOGPROB:
        return
    logprobs = group.logprobs
    # nan compares as False
    is_plausible = (logprobs >= LOWEST_LOGPROB) & (logprobs <= HIGHEST_LOGPROB)
    wrong = ~is_plausible & (group.mask > 0)
    if wrong.any():
        position = int(wrong.argmax())
        raise WireError(
            f"the logprob {float(logprobs[position]):g} of trained token {position} is outside of "
            f"{LOWEST_LOGPROB:g} to 0",
            hint="submit the natural log of the probability with which each token was sampled, "
            "and mask 0 for tokens that were not sampled",
        )


def _name_id(group: RolloutGroup, largest: int) -> None:
    """Raise the error of the first id that is negative or too large."""
    for name, ids in (("prompt_ids", group.prompt_ids), ("response_ids", group.response_ids)):
        # as unsigned numbers, negative ids are beyond any vocabulary
        wrong = ids.view(np.uint32) > largest
        if wrong.any():
            position = int(wrong.argmax())
            raise WireError(
                f"the token id {int(ids[position])} in {name}, at {position}, is not in the "
                f"model's vocabulary of {largest + 1}",
                hint="let workers and trainer use the same model and tokenizer",
            )
