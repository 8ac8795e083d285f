"""Records what the loss function of a learner is given, micro-batch by micro-batch.

The data's path is the real one: filter, advantages, packing, micro-batches. Only what is computed
from them is left out: a forward pass over such batches takes a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.wire.group import RolloutGroup
from consumer.config.learner import LearnerConfig, LossConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy.micro_batch import MicroBatch, Packer, TrainBatch, Update
from consumer.grpo.policy.policy import Policy
from consumer.handle.batch import BatchTable
from consumer.handle.ranks import ALONE, Ranks
from proofs.truth.witness import Content, Note, content

BUDGET = 65_536
"""Slots of a micro-batch."""


class WitnessPolicy(Policy):
    """Writes down each micro-batch instead of computing log-probabilities."""

    def __init__(self, model_dir: Path, note: Note, ranks: Ranks = ALONE, updates: int = 1) -> None:
        # with an entropy term, rollouts without an advantage are used, too
        loss = LossConfig(entropy_coef=1e-6)
        config = LearnerConfig(token_budget=BUDGET, updates_per_batch=updates, loss=loss)
        super().__init__(model_dir, config, ranks=ranks)
        self._note = note
        self._seen = 0
        self.groups: Sequence[RolloutGroup] = ()
        self.train_step = 0

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Write down what `compute_old_logprobs` reads."""
        self.see(batch)
        return torch.zeros(len(batch.targets))

    def see(self, batch: MicroBatch, advantages: Tensor | None = None) -> None:
        self._seen += 1
        where = (self.train_step, self.ranks.rank, self._seen)
        note_micro_batch(self._note, *where, self.groups, batch, advantages)


class WitnessController(TrainController):
    """Writes down each micro-batch instead of computing its loss, and takes no optimizer step."""

    policy: WitnessPolicy

    def pack(
        self, groups: Sequence[RolloutGroup], *, keep: NDArray[np.bool_] | None = None
    ) -> TrainBatch:
        self.policy.groups = groups
        return super().pack(groups, keep=keep)

    def _backward(self, update: Update, index: int) -> dict[str, float]:
        """Write down what the forward pass and the loss of the controller's own are given."""
        self.policy.see(update.batches[index], update.advantages[index])
        for column in (update.logprobs, update.entropy):  # which no model has computed
            column.append(torch.zeros_like(update.batches[index].rollout_logprobs))
        return {"tokens": 0.0}

    def _optimize(self, update: Update) -> dict[str, float]:
        return {}


class LossWitness:
    """A trainer's step that writes down what it uses; see `proofs.truth.witness`."""

    def __init__(self, model_dir: Path, note: Note, ranks: Ranks = ALONE, updates: int = 1) -> None:
        self._note = note
        policy = WitnessPolicy(model_dir, note, ranks, updates)
        self._controller = WitnessController(policy, "rloo")
        self._rank = ranks.rank

    def fit(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        self._begin(step, groups)
        self._controller.policy.train_step = step
        self._controller.fit(groups)

    def look(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Use groups that are not trained, of an evaluation for example, as micro-batches."""
        self._begin(step, groups)
        for number, batch in enumerate(Packer(BUDGET).pack_pad_dispatch(BatchTable.of(groups))):
            note_micro_batch(self._note, step, self._rank, number, groups, batch)

    def _begin(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        sizes = {group.gid: len(group.head.responses) for group in groups}
        self._note("batch", step=step, rank=self._rank, groups=sizes)


def note_micro_batch(
    note: Note,
    step: int,
    rank: int,
    number: int,
    groups: Sequence[RolloutGroup],
    batch: MicroBatch,
    advantages: Tensor | None = None,
) -> None:
    """Write down the rollouts of a micro-batch of `groups`."""
    members = [*members_in(batch, groups, advantages)]
    note("loss", step=step, rank=rank, micro=number, members=members)


def members_in(
    batch: MicroBatch, groups: Sequence[RolloutGroup], advantages: Tensor | None
) -> Iterator[Content]:
    ids = batch.input_ids.flatten().numpy().astype("<i4")
    targets = batch.targets.numpy().astype("<i4")
    ends = np.cumsum(np.bincount(batch.sample.numpy(), minlength=len(batch.rollout))).tolist()
    owners = [(group, n) for group in groups for n in range(len(group))]
    for start, end, rollout in zip([0, *ends], ends, batch.rollout.tolist(), strict=False):
        group, n = owners[rollout]
        part = slice(start, end)
        prompt = len(group.prompt_ids)
        # the slot of its first token is as far before its first prediction as its prompt is long
        slot = int(batch.logit_index[start]) + 1 - prompt
        response = ids[slot + prompt : slot + prompt + end - start]
        found = content(
            ids[slot : slot + prompt],
            response,
            batch.rollout_logprobs[part].numpy(),
            batch.mask[part].numpy(),
            group.spans()[n],
        )
        found |= {"gid": group.gid, "member": int(group.columns["indices"][n])}
        found["is_predicted"] = bool(np.array_equal(response, targets[part]))
        found["reward"] = float(group.scores[n])
        if advantages is not None:
            found["advantages"] = np.unique(advantages[part].numpy()).tolist()
        yield found
