"""What the loss makes of the teachers of a task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from buffer.config.section import Section

Outside = Literal["bucket", "renormalise"]


class DistillationConfig(Section):
    """[learner.distillation]: train the policy on its own tokens towards the teachers of its tasks.

    Teachers are added up by their weight ([tasks.<name>.teachers.<teacher>]). A token without the
    values of a teacher is trained without them. See docs/pages/distillation.md.
    """

    coef: float = Field(1.0, ge=0, le=1e6)
    """what log(teacher / policy) of the sampled token is multiplied by before it is added to the
    token's advantage; 0: it is not added
    """
    clip: float = Field(10.0, gt=0, le=1e6)
    """bound of log(teacher / policy) in nats, and of the loss over top tokens"""
    top_k_loss: Literal["none", "forward", "reverse"] = "none"
    """a loss beside the policy loss, over the top_k most probable tokens of each teacher: forward
    is KL(teacher, policy), reverse is KL(policy, teacher)
    """
    top_k_coef: float = Field(1.0, gt=0, le=1e6)
    """weight of that loss"""
    outside: Outside = "bucket"
    """how it counts all other tokens: as one more token with the rest of the probability (bucket),
    or not at all, so that the policy is not kept from them (renormalise)
    """

    def problems(self) -> Iterator[str]:
        """Yield each key that the others make impossible."""
        if self.top_k_loss == "none":
            if self.coef == 0:
                yield "coef = 0 without top_k_loss: teachers would have no effect"
            if self.top_k_coef != 1.0 or self.outside != "bucket":
                yield "top_k_coef and outside cannot act without top_k_loss"
