"""Which groups and rollouts of a delivered batch are not trained, and why (`REASONS`, README.md).

Groups whose rollouts cannot be compared are excluded; a rollout that cannot be trained is masked,
but its score counts for the others. The result depends on batch and config alone, so a batch that
is delivered again is filtered in the same way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from buffer.control.length_counts import FINISHED
from buffer.errors import ConfigError
from buffer.wire.columns import known_column
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import Status
from consumer.grpo.policy.column_readers import ColumnReader, MaskReader

log = logging.getLogger("rolloutmq.trainer")

REASONS = (
    "not_completed", "missing_reward", "length_mismatch", "no_prompt", "multimodal",
    "routed_experts", "sampling_mask", "unread_column", "overlong", "truncated",
)  # fmt: skip


UNREAD = (
    "the groups of the batch have token columns that the loss does not read: the log names them",
    "docs/pages/loss.md says which [trainer] advantages read token_rewards; teacher_logprobs are "
    "read by [learner.distillation], others by an advantages or objective function of yours; or "
    "remove them from the judge's answers",
)
"""A mistake of the config where all groups of a batch have such a column: error and hint."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """What is left of a batch: the groups to train, in order.

    `counts`: what was excluded, by reason: groups for the first eight of `REASONS`, else rollouts.
    `reasons`: of each rollout of all groups, in order; "" for one that may be trained.
    """

    groups: list[RolloutGroup]
    counts: dict[str, int]
    reasons: list[str]

    def fates(
        self, groups: Sequence[RolloutGroup], has_gradient: NDArray[np.bool_] | None
    ) -> list[str]:
        """Return for each rollout why it has no gradient, or FINISHED; "" for untrained roles.

        Beside the reasons of the filter: `stale` if all its tokens are too old, `no_advantage` if
        its score is as good as the others. `groups`: the whole batch. `has_gradient`: by its
        advantage, of each rollout to train; None: all.
        """
        advantages = iter(() if has_gradient is None else has_gradient.tolist())
        reasons, included = iter(self.reasons), {id(group) for group in self.groups}
        fates: list[str] = []
        for group in groups:
            own = [*islice(reasons, len(group))]
            if id(group) in included:
                is_trained = group.sums(group.mask) > 0
                for n, reason in enumerate(own):
                    advantage = FINISHED if next(advantages, True) else "no_advantage"
                    found = reason or (advantage if is_trained[n] else "stale")
                    own[n] = found if group.in_training[n] else ""
            fates += own
        return fates

    def metrics(self) -> dict[str, float]:
        return {f"filtered/{reason}": float(self.counts.get(reason, 0)) for reason in REASONS}


class BatchFilter:
    """Excludes the groups and rollouts of a batch that cannot be trained.

    `max_sequence_tokens`: of prompt and response; None: unbounded. `readers`: of the large columns
    that the model needs. `read_columns`: the optional token columns that the loss reads, by name or
    kind; a group with another is excluded, as its author expects an effect; None: all.
    `needs_rewards`: exclude groups in which a rollout has no score.
    """

    def __init__(
        self,
        max_sequence_tokens: int | None = None,
        *,
        mask_truncated: bool = False,
        readers: Sequence[ColumnReader] = (MaskReader(),),
        read_columns: Set[str] | None = None,
        needs_rewards: bool = True,
    ) -> None:
        self._max_sequence_tokens = max_sequence_tokens
        self._mask_truncated = mask_truncated
        self._readers = readers
        self._read_columns = read_columns
        self._needs_rewards = needs_rewards

    def apply(self, groups: Sequence[RolloutGroup]) -> Filtered:
        """Return the groups to train. Masks rollouts in place; a second call changes nothing.

        Raises ConfigError where no group has usable experts, or all have a column that is not read.
        """
        kept: list[RolloutGroup] = []
        counts: Counter[str] = Counter()
        reasons: list[str] = []
        for group in groups:
            if problem := self._problem(group):
                reason, detail = problem
                counts[reason] += 1
                log.error("group not trained, %s: %s", reason, detail, extra={"gid": group.gid})
                reasons += [reason] * len(group.lengths)
                continue
            masked = self._mask(group)
            counts.update(masked.values())
            reasons += [masked.get(index, "") for index in range(len(group.lengths))]
            kept.append(group)
        mistakes = {reader.name: reader.mistake for reader in self._readers}
        for reason, (what, hint) in {**mistakes, "unread_column": UNREAD}.items():
            if groups and counts[reason] == len(groups):
                raise ConfigError(what, hint=hint)
        return Filtered(kept, dict(counts), reasons)

    def computable(self, group: RolloutGroup) -> NDArray[np.bool_]:
        """Return which rollouts have tokens that were sampled and are not too long, bool[k]."""
        return (group.sums(group.sampled_mask) > 0) & ~self._overlong(group)

    def _problem(self, group: RolloutGroup) -> tuple[str, str] | None:
        """Return why a group cannot be trained, as (reason, detail); None where it can."""
        lengths, tokens = group.lengths, int(group.lengths.sum())
        if group.status is not Status.COMPLETED:
            return "not_completed", f"it is {group.status}"
        if group.multimodal:
            return (
                "multimodal",
                "its prompt contains images, which need a trainer of your own (trainer.loop): "
                "see consumer/README.md",
            )
        sizes = {name: len(getattr(group, name)) for name in ("response_ids", "logprobs", "mask")}
        if wrong := {name: size for name, size in sizes.items() if size != tokens}:
            return "length_mismatch", f"its lengths add up to {tokens} tokens, but it has {wrong}"
        firsts = (np.cumsum(lengths) - lengths)[lengths > 0]
        # the sessions of agents may share no first token: then the group has no prompt
        if not len(group.prompt_ids) and group.mask[firsts].any():
            return "no_prompt", "it has no prompt ids, and its first tokens are trained"
        missing = np.flatnonzero(~np.isfinite(group.scores)).tolist()
        if missing and self._needs_rewards:
            return "missing_reward", f"rollouts {missing} have no score"
        for name in group.optional_columns():
            kind = name.partition("/")[0]
            comes_alone = not known_column(kind).beside
            read = self._read_columns
            if comes_alone and read is not None and read.isdisjoint((name, kind)):
                return "unread_column", f"nothing reads its {name}"
        for reader in self._readers:
            if detail := reader.problem(group):
                return reader.name, detail
        return None

    def _mask(self, group: RolloutGroup) -> dict[int, str]:
        """Mask the rollouts of a group that cannot be trained; return their reasons."""
        too_long = self._overlong(group)
        truncated = np.zeros(len(group), np.bool_)
        if self._mask_truncated:
            # an agent's session ends with its last segment
            ends = {name: group.truncated[n] for n, name in enumerate(group.sessions)}
            truncated = group.truncated | [ends[name] for name in group.sessions]
        masked: dict[int, str] = {}
        for index in np.flatnonzero(too_long | truncated).tolist():
            reason = masked[index] = "overlong" if too_long[index] else "truncated"
            log.warning("rollout %s not trained: %s", index, reason, extra={"gid": group.gid})
        if masked:
            rollout = np.repeat(np.arange(len(group)), group.lengths)
            # a copy: arrays that were decoded from the wire are read-only
            mask = group.mask.copy()
            mask[np.isin(rollout, [*masked])] = 0
            group.mask = mask
        return masked

    def _overlong(self, group: RolloutGroup) -> NDArray[np.bool_]:
        limit = self._max_sequence_tokens
        totals = len(group.prompt_ids) + group.lengths
        return totals > (np.iinfo(np.int32).max if limit is None else limit)
