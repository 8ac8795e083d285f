"""What teachers add to the policy loss: an advantage of each token, and a KL over top tokens.

The advantage of a token y under the present policy s (a number without gradient) and teachers t is

    coef * sum of weight_t * clamp(log t(y) - log s(y), -clip, clip)

Its policy gradient is that of -KL(s, t) in each state ("On-Policy Distillation", Thinking Machines
Lab 2025). s is the present policy, as in verl and prime-rl, because the objective's ratio corrects
for the policy that sampled. With the logprobs of that one in its place (Tinker, slime), rollouts of
older weights would also push the policy away from these weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from consumer.config.learner import DistillationConfig, LossConfig, Outside
from consumer.grpo.learner.losses import TokenColumns
from consumer.grpo.policy.micro_batch import MicroBatch

TeacherWeights = Mapping[str, Mapping[str, float]]
"""The weight of each teacher of each task; a teacher that is not in it has weight 1."""


class Distillation:
    """Adds what [learner.distillation] describes to the columns of a micro-batch.

    `loss`: the teacher that its KL term reads is no other teacher.
    """

    def __init__(
        self, config: DistillationConfig, weights: TeacherWeights, loss: LossConfig
    ) -> None:
        self._config = config
        self._weights = weights
        self._kl_reference = loss.kl_reference
        self._importance_cap = loss.importance_cap
        names = {name for own in weights.values() for name in own} - {loss.kl_reference}
        # each rank reports every metric, also one without rollouts of this teacher
        self._named = sorted(names) if len(names) > 1 else []

    def apply(
        self, columns: TokenColumns, batch: MicroBatch, others: Tensor | None
    ) -> TokenColumns:
        """Return the columns with the teachers' advantages, extra loss and metrics.

        `others`: logprobs of `batch.other_ids()` under the policy, with gradient.
        """
        pull, metrics = self._pull(columns, batch)
        advantages = columns.advantages + self._config.coef * pull
        if self._config.top_k_loss == "none":
            return replace(columns, advantages=advantages, extra_metrics=metrics)
        loss, more = self._top_loss(columns, batch, others)
        return replace(
            columns, advantages=advantages, extra_loss=loss, extra_metrics=metrics | more
        )

    @torch.no_grad()
    def _pull(self, columns: TokenColumns, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        trained = columns.mask > 0
        pull, kl = (torch.zeros_like(columns.logprobs) for _ in range(2))
        covered, clipped = (torch.zeros_like(trained) for _ in range(2))
        importance = columns.importance(self._importance_cap)
        metrics = {
            f"distill/{kind}/{name}": kl.sum()
            for name in self._named
            for kind in ("coverage", "reverse_kl")
        }
        for column, teacher in batch.optional.items():
            name = column.removeprefix("teacher_logprobs/")
            if name in (column, self._kl_reference):
                continue
            known = trained & ~teacher.isnan()
            gap = torch.where(known, teacher - columns.logprobs, 0.0)
            bounded = gap.clamp(-self._config.clip, self._config.clip)
            weight = self._weight(name, batch)
            pull += weight * bounded
            kl -= weight * importance * gap
            covered |= known
            clipped |= bounded != gap
            if name in self._named:
                metrics[f"distill/coverage/{name}"] = known.float().sum()
                metrics[f"distill/reverse_kl/{name}"] = -(importance * gap).sum()
        metrics["distill/coverage"] = covered.float().sum()
        metrics["distill/reverse_kl"] = kl.sum()
        metrics["distill/clip_fraction"] = clipped.float().sum()
        return pull, metrics

    def _top_loss(
        self, columns: TokenColumns, batch: MicroBatch, others: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token, and its metrics."""
        config = self._config
        trained = columns.mask > 0
        loss = torch.zeros_like(columns.logprobs)
        kl, masses = torch.zeros_like(loss), [torch.zeros_like(loss) for _ in range(2)]
        covered = torch.zeros_like(trained)
        places = batch.places_of_ids()
        for column, teacher in batch.optional.items():
            name = column.removeprefix("teacher_top_logprobs/")
            if name == column:
                continue
            assert others is not None
            student = others[:, places[f"teacher_top_ids/{name}"]]
            known = trained & (student > -torch.inf).any(1) & ~teacher[:, 0].isnan()
            known &= name != self._kl_reference
            # any finite number
            pair = [torch.where(known[:, None], x, -20.0) for x in (student, teacher)]
            own = top_k_kl(*pair, reverse=config.top_k_loss == "reverse", outside=config.outside)
            own = torch.where(known, own, 0.0)
            # scaled, not cut: a cut would take the gradient from the worst tokens
            bounded = own * (config.clip / own.detach().clamp(min=config.clip))
            weight = self._weight(name, batch)
            loss = loss + weight * bounded
            kl += weight * own.detach()
            for mass, logprobs in zip(masses, pair, strict=True):
                mass += torch.where(known & ~covered, logprobs.detach().exp().sum(1), 0.0)
            covered |= known
        names = ("top_coverage", "top_kl", "top_mass", "teacher_top_mass")
        values = (covered.float(), kl, *masses)
        sums = {f"distill/{n}": value.sum() for n, value in zip(names, values, strict=True)}
        return config.top_k_coef * loss, sums

    def _weight(self, name: str, batch: MicroBatch) -> Tensor:
        """Return the weight of a teacher for each token, float32[N]."""
        own = [self._weights.get(task, {}).get(name, 1.0) for task in batch.tasks]
        return torch.tensor(own, device=batch.sample.device)[batch.sample]


def of_covered_tokens(means: Mapping[str, float]) -> dict[str, float]:
    """Make means over all trained tokens those over the tokens with the values of a teacher."""

    def share(metric: str) -> float:
        kind, *teacher = metric.split("/")[1:]
        covered = "top_coverage" if "top" in kind else "coverage"
        return 1.0 if kind == covered else means["/".join(["distill", covered, *teacher])]

    return {
        name: value / (share(name) or 1.0) if name.startswith("distill/") else value
        for name, value in means.items()
    }


def top_k_kl(student: Tensor, teacher: Tensor, *, reverse: bool, outside: Outside) -> Tensor:
    """Return KL(teacher, student), or with `reverse` KL(student, teacher), float32[N].

    (GKD, Agarwal et al. 2023, arXiv:2306.13649, has the KL over all tokens; with a bucket, this is
    a lower bound of it.) `student`, `teacher`: logprobs of the teacher's top tokens, float32[N, k].
    Tokens with -inf in either count as outside. `outside`: see `DistillationConfig`.
    """
    padded = (teacher == -torch.inf) | (student == -torch.inf)
    student, teacher = (x.masked_fill(padded, -torch.inf) for x in (student, teacher))
    masses = [torch.logsumexp(x, 1, keepdim=True) for x in (student, teacher)]
    if outside == "bucket":
        # beyond -1e-6, the rest of the mass is rounding
        rests = [torch.log(-torch.expm1(mass.clamp(max=-1e-6))) for mass in masses]
        student, teacher = (
            torch.cat(pair, 1) for pair in zip((student, teacher), rests, strict=True)
        )
    else:
        student, teacher = student - masses[0], teacher - masses[1]
    first, second = (student, teacher) if reverse else (teacher, student)
    gap = torch.where(first > -torch.inf, first - second, 0.0)
    return (first.exp() * gap).sum(1)
