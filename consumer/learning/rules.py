"""Findings that are one metric beyond a bound for some steps: a row each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from consumer.learning.checks import BACK, SAME_POLICY, SLOWER
from consumer.learning.window import PATIENCE, LearningFinding, Test, Window

DIFFERS = f"{SAME_POLICY}; where they are old, {SLOWER}"
OTHER_JUDGE = f"if their reward is high, a judge that does not pay for them; else {BACK}"


class MetricRule(NamedTuple):
    """A finding where the mean of `over` values of `metric` in a row passes `test`.

    `is_of_task`: the metric is METRIC/TASK. In `what`: {task}, {value} of the metric, {reward} of
    the rollouts that METRIC_reward/TASK has, else of the task. `look`: more metrics.
    """

    name: str
    metric: str
    test: Test
    what: str
    fix: str
    look: tuple[str, ...] = ()
    over: int = PATIENCE
    level: Literal["warning", "error"] = "warning"
    is_of_task: bool = True

    def found(self, run: Window) -> Iterator[LearningFinding]:
        every = run.by_task(self.metric) if self.is_of_task else {"": run.series(self.metric)}
        for task, series in every.items():
            since = series.since(self.test, self.over)
            if since is None:
                continue
            metric = f"{self.metric}/{task}" if self.is_of_task else self.metric
            of_them = run.series(f"{self.metric}_reward/{task}")
            reward = of_them if len(of_them.values) else run.reward(task)
            value, got = series.mean(self.over), reward.mean(self.over)
            what = self.what.format(task=task, value=value, reward=got)
            look = (*run.groups(task), metric, *self.look)
            yield LearningFinding(self.name, what, self.fix, since, look, self.level, task)


RULES = (
    # a yes/no task may have 0.7
    MetricRule("same_response", "same_response", lambda means: means > 0.9,
        "{value:.0%} of the responses of task {task} are one text, for different prompts; their "
        "reward is {reward:.2g}", OTHER_JUDGE, over=3),
    # small models loop in a few per cent; prime-rl and MiniMax-M1 (arXiv:2506.13585) stop one
    MetricRule("looping", "looping", lambda means: means > 0.3,
        "{value:.0%} of the responses of task {task} repeat the same few tokens to their end; "
        "their reward is {reward:.2g}", OTHER_JUDGE, over=3),
    # a judge that computes has 0, a model at temperature 0 about 0.01
    MetricRule("judge_disagreement", "judge_disagreement", lambda means: means > 0.05,
        "{value:.0%} of the responses of task {task} that repeat another of their group got a "
        "different score: the judge's noise is trained",
        "a judge at temperature 0, the mean of several judgements, a coarser score; `rolloutmq "
        "rejudge GID` judges one again"),
    MetricRule("gradient_not_finite", "optim/skipped_updates", lambda means: means > 0,
        "gradients are not finite: updates are skipped, {value:.2g} in each train step",
        f"if all are: the loss overflows (objective, advantages); if some: {BACK}; the trainer's "
        "log names the groups", ("optim/grad_norm",), over=5, is_of_task=False),
    MetricRule("no_gradient", "optim/grad_norm", lambda means: means == 0,
        "the gradient is 0: no weight changes",
        "is everything masked (mask_truncated, max_sequence_tokens, train_roles)? do rewards "
        "differ within a group?",
        ("batch/trained_share", "rewards/std"), level="error", is_of_task=False),
    # AdamW does not see a constant factor, and tiny healthy models have 0.5 at each step; below a
    # tenth, a few large steps decide the moments
    MetricRule("gradient_clipped", "optim/clip_scale", lambda means: means < 0.1,
        "every gradient is clipped, to {value:.1%} of its length",
        "a lower learning rate if its norm rose; else a larger max_grad_norm",
        ("optim/grad_norm",), over=20, is_of_task=False),
    # PPO has up to 0.1, GSPO (arXiv:2507.18071) 0.15 by design
    MetricRule("policy_jump", "policy/clip_fraction", lambda means: means > 0.3,
        "{value:.0%} of the tokens are clipped: the policy moved away from what sampled them",
        f"{SLOWER}, fewer updates_per_batch", ("policy/ratio", "staleness/mean"), is_of_task=False),
    # half of the batch has no weight; 0 is the value without a token
    MetricRule("mismatch", "mismatch/ess", lambda means: (means < 0.5) & (means > 0),
        "rollouts are not of the policy that trains on them: {value:.0%} of the tokens have weight",
        DIFFERS, ("mismatch/kl", "staleness/mean"), is_of_task=False),
    MetricRule("mismatch", "mismatch/dropped_fraction", lambda means: means > 0.2,
        "rollouts are not of the policy that trains on them: {value:.0%} of the tokens are dropped",
        DIFFERS, ("mismatch/kl", "staleness/mean"), is_of_task=False),
)  # fmt: skip
