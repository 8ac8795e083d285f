"""What of a delivered batch is not trained, and why. Nothing is trained in another one's place, and nothing shifts.

A group is left out whole where its rollouts cannot be compared, a rollout is masked where it alone cannot be trained:
its score still counts for the others. What is left out stays in the batch's record, and is committed with it. All this
is a function of the batch and the config, so that a batch that is delivered again is filtered again the same.

    missing_reward     a rollout without reward["score"], or one that is no number
    length_mismatch    ids, logprobs and mask of a group that are not of one length
    no_prompt          no prompt ids: nothing predicts the first token
    multimodal         a prompt of more than text: token ids alone are another prompt
    routed_experts     a rollout whose experts cannot be replayed ([learner] replay_routing): none, of another model …
    overlong           a rollout of more than `max_sequence_tokens`, with its prompt
    truncated          a rollout that ran into its token limit, where `mask_truncated` asks for it (DAPO's overlong
                       filtering, arXiv:2503.14476, section 3.4)
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError
from buffer.group import RolloutGroup
from consumer.recorded_experts import RecordedExperts

log = logging.getLogger("rolloutmq.trainer")

REASONS = ("missing_reward", "length_mismatch", "no_prompt", "multimodal", "routed_experts", "overlong", "truncated")


@dataclass(frozen=True, slots=True)
class Filtered:
    """What is left of a batch. `groups` are the ones to train, in their order; `counts` by reason: of groups for the
    first five, else of rollouts."""

    groups: list[RolloutGroup]
    counts: dict[str, int]

    def metrics(self) -> dict[str, float]:
        return {f"filtered/{reason}": float(self.counts.get(reason, 0)) for reason in REASONS}


class BatchFilter:
    """`max_sequence_tokens`: prompt and response together; None: no bound. `recorded`: where routing is replayed."""

    def __init__(
        self,
        max_sequence_tokens: int | None = None,
        *,
        mask_truncated: bool = False,
        recorded: RecordedExperts | None = None,
    ) -> None:
        self._longest, self._mask_truncated, self._recorded = max_sequence_tokens, mask_truncated, recorded

    def apply(self, groups: Sequence[RolloutGroup]) -> Filtered:
        """Groups whose rollouts are masked are changed in place, the same however often this is done.

        Raises ConfigError where no group has experts to replay: that is no worker's fault.
        """
        kept: list[RolloutGroup] = []
        counts: Counter[str] = Counter()
        for group in groups:
            if found := _problem(group) or self._misrouted(group):
                reason, what = found
                counts[reason] += 1
                log.error("group not trained, %s: %s", reason, what, extra={"gid": group.gid})
                continue
            counts.update(self._mask(group))
            kept.append(group)
        if groups and counts["routed_experts"] == len(groups):
            hint = "set [engine] routed_experts = true for the workers, or leave out [learner] replay_routing"
            raise ConfigError("no group of the batch has experts that can be replayed: see the log", hint=hint)
        return Filtered(kept, dict(counts))

    def _misrouted(self, group: RolloutGroup) -> tuple[str, str] | None:
        problem = self._recorded.problem(group) if self._recorded else ""
        return ("routed_experts", problem) if problem else None

    def _mask(self, group: RolloutGroup) -> Counter[str]:
        told: Counter[str] = Counter()
        ends = np.cumsum(group.lengths)
        for number, reason in self._unusable(group):
            part = slice(int(ends[number] - group.lengths[number]), int(ends[number]))
            group.mask = _without(group.mask, part)
            told[reason] += 1
            log.warning("rollout %s not trained: %s", number, reason, extra={"gid": group.gid})
        return told

    def _unusable(self, group: RolloutGroup) -> list[tuple[int, str]]:
        found = []
        for number, (member, length) in enumerate(zip(group.members, group.lengths.tolist(), strict=True)):
            if self._longest is not None and len(group.prompt_ids) + length > self._longest:
                found.append((number, "overlong"))
            elif self._mask_truncated and member.get("finish_reason") == "length":
                found.append((number, "truncated"))
        return found


def _problem(group: RolloutGroup) -> tuple[str, str] | None:
    if not len(group.prompt_ids):
        return "no_prompt", "it has no prompt ids"
    if group.multimodal:
        return "multimodal", "it shows images, which a trainer of yours (trainer.loop) reads: see consumer/README.md"
    tokens = int(group.lengths.sum())
    sizes = {name: len(getattr(group, name)) for name in ("response_ids", "logprobs", "mask")}
    if wrong := {name: size for name, size in sizes.items() if size != tokens}:
        return "length_mismatch", f"its lengths add up to {tokens} tokens, but it has {wrong}"
    missing = np.flatnonzero(~np.isfinite(group.scores)).tolist()
    return ("missing_reward", f"rollouts {missing} have no score") if missing else None


def _without(mask: NDArray[np.uint8], part: slice) -> NDArray[np.uint8]:
    mask = mask.copy()  # what came over the wire cannot be written to
    mask[part] = 0
    return mask
