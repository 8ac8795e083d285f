"""Findings about the policy, its gradient and its distance from the engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from consumer.learning.reward_checks import NEARLY_SOLVED, PATIENCE
from consumer.learning.window import Finding, Window

COLLAPSED, LOWEST_ENTROPY = 0.1, 0.01
"""Share of its start that is left, or nats per token. A reward is paid for with entropy
(arXiv:2505.22617: R = -a exp(H) + b), so that it is a finding only where the reward does not rise.
"""

EXPLODED, LEAST_RISE = 2.0, 0.5
"""Factor and nats by which entropy rises above its lowest: text becomes noise."""

KL = 0.1
"""Between the policy that sampled and the one that trains. PPO stops an update at 0.015 to 0.03
(Spinning Up, CleanRL), Tinker calls below 0.01 stable; stale rollouts reach some hundredths.
"""

SPIKE = 10.0
"""Times the median of the window; and above `KL`."""

CLIPPED = 0.3
"""Share of tokens without a gradient for their ratio. PPO has up to 0.1, GSPO (arXiv:2507.18071)
0.15 by design.
"""

DROPPED = 0.2
"""Share of trained tokens whose importance weight is out of bounds."""

FEWEST_ESS = 0.5
"""Effective share of the tokens: below, half of the batch has no weight."""

CLIP_SCALE = 0.1
"""Factor by which max_grad_norm shortens a gradient. AdamW does not see a constant factor, and tiny
models have one of 0.5 at each step; below a tenth, a few large steps decide the moments.
"""


def entropy_collapse(run: Window) -> Iterator[Finding]:
    """Find a policy that has become certain before it has learned the task."""
    entropy = run.series("policy/entropy")
    if len(entropy.values) < 2 * PATIENCE or run.rises():
        return
    start, now = float(entropy.values[:5].mean()), entropy.mean(PATIENCE)
    limit = max(COLLAPSED * start, LOWEST_ENTROPY)
    since = entropy.since(lambda means: means < limit, PATIENCE)
    reward = run.reward().mean(PATIENCE)
    if since is not None and start > LOWEST_ENTROPY and not reward >= NEARLY_SOLVED:
        yield Finding(
            f"entropy fell from {start:.2g} to {now:.2g} nats per token, and the reward stays at "
            f"{reward:.2g}: all rollouts of a prompt become the same, and nothing new is tried",
            "a lower learning rate, a larger clip_high (DAPO), a small entropy_coef, temperature "
            "1; continue from a checkpoint before it",
            since,
            ("policy/entropy", "rewards/mean"),
        )


def entropy_explosion(run: Window) -> Iterator[Finding]:
    """Find a policy that writes noise."""
    entropy = run.series("policy/entropy")
    if len(entropy.values) < 2 * PATIENCE or run.rises():
        return
    means = np.convolve(entropy.values, np.full(5, 0.2), "valid")
    lowest, now = float(means.min()), entropy.mean(PATIENCE)
    limit = max(EXPLODED * lowest, lowest + LEAST_RISE)
    since = entropy.since(lambda means: means > limit, PATIENCE)
    if since is not None:
        yield Finding(
            f"entropy rose from {lowest:.2g} to {now:.2g} nats per token without a better reward",
            "a lower learning rate, entropy_coef = 0; continue from a checkpoint before it",
            since,
            ("policy/entropy", "rewards/mean", "optim/grad_norm"),
        )


def policy_jump(run: Window) -> Iterator[Finding]:
    """Find batches that change the policy by too much, or that an old policy sampled."""
    fix = "a lower learning rate, fewer updates_per_batch, a smaller max_staleness"
    clipped, kl = run.series("policy/clip_fraction"), run.series("policy/kl_old")
    since = clipped.since(lambda means: means > CLIPPED, PATIENCE)
    if since is not None:
        yield Finding(
            f"{clipped.mean(PATIENCE):.0%} of the tokens are clipped: their ratio to the policy "
            "that sampled them left its bounds",
            fix,
            since,
            ("policy/clip_fraction", "policy/ratio", "staleness/mean"),
        )
        return
    newest = kl.values[-PATIENCE:]
    if len(newest) and newest.max() > max(KL, SPIKE * float(np.median(kl.values))):
        step = kl.steps[len(kl.values) - len(newest) + int(newest.argmax())]
        yield Finding(
            f"the policy jumped at step {step}: KL {newest.max():.2g} to the one that sampled "
            f"(median {float(np.median(kl.values)):.2g})",
            fix,
            step,
            ("policy/kl_old", "policy/ratio", f"rolloutmq batch {step}"),
        )


def mismatch(run: Window) -> Iterator[Finding]:
    """Find rollouts whose log-probabilities are not those of the policy that trains on them."""
    kl, ess = run.series("mismatch/kl"), run.series("mismatch/ess")
    dropped = run.series("mismatch/dropped_fraction")
    found = {
        f"KL {kl.mean(PATIENCE):.2g}": kl.since(lambda means: means > KL, PATIENCE),
        f"{ess.mean(PATIENCE):.0%} effective tokens": ess.since(
            lambda means: (means < FEWEST_ESS) & (means > 0), PATIENCE
        ),
        f"{dropped.mean(PATIENCE):.0%} of the tokens dropped": dropped.since(
            lambda means: means > DROPPED, PATIENCE
        ),
    }
    since = [step for step in found.values() if step is not None]
    if since:
        words = ", ".join(what for what, step in found.items() if step is not None)
        stale = run.series("staleness/mean").mean(PATIENCE)
        is_stale = stale > 1
        yield Finding(
            f"rollouts are not of the policy that trains on them: {words}"
            + (f", at a staleness of {stale:.1f}" if is_stale else ""),
            "a smaller max_staleness, a lower learning rate"
            if is_stale
            else "the same dtype, attention and chat template in engine and trainer; a temperature "
            "that both know; weights that workers really load",
            min(since),
            ("mismatch/kl", "mismatch/ess", "mismatch/dropped_fraction", "staleness/mean"),
        )


def no_gradient(run: Window) -> Iterator[Finding]:
    """Find steps that change no weight."""
    norm = run.series("optim/grad_norm")
    since = norm.since(lambda means: means == 0, PATIENCE)
    if since is not None:
        yield Finding(
            f"the gradient is 0 since step {since}: no weight changes",
            "rewards must differ within a group, and tokens must be trained: is everything masked "
            "(mask_truncated, max_sequence_tokens, train_roles)?",
            since,
            ("optim/grad_norm", "batch/trained_share", "rewards/std"),
            "error",
        )


def gradient_not_finite(run: Window) -> Iterator[Finding]:
    """Find optimizer steps that were skipped, since their gradient has no finite norm."""
    skipped = run.series("optim/skipped_updates")
    newest = skipped.values[-PATIENCE:]
    if newest.sum() > 0:
        first = skipped.steps[len(skipped.values) - len(newest) + int(np.argmax(newest > 0))]
        yield Finding(
            f"{newest.sum():.0f} optimizer steps of the last {len(newest)} train steps were "
            "skipped: their gradient is not finite",
            "a lower learning rate, and an older checkpoint: weights may be where gradients "
            "overflow; the trainer's log names the groups",
            first,
            ("optim/skipped_updates", "optim/grad_norm"),
            "error" if newest[-3:].all() else "warning",
        )


def gradient_clipped(run: Window) -> Iterator[Finding]:
    """Find gradients that are all far above max_grad_norm."""
    scale = run.series("optim/clip_scale")
    since = scale.since(lambda means: means < CLIP_SCALE, 2 * PATIENCE)
    if since is not None and scale.values[-2 * PATIENCE :].max() < 1:
        norm = run.series("optim/grad_norm").mean(2 * PATIENCE)
        yield Finding(
            f"every gradient is clipped, to {scale.mean(2 * PATIENCE):.1%} of its length (mean "
            f"norm {norm:.3g})",
            "a lower learning rate if the norm rose; else a larger max_grad_norm",
            since,
            ("optim/grad_norm", "optim/clip_scale"),
        )


LOSSES = {
    "expired": "`rolloutmq set tasks.TASK.on_straggler=wait`, or a larger "
    "`tasks.TASK.max_staleness`",
    "failed": "`rolloutmq dead` has the causes; a time limit ends long ones",
    "interrupted": "set [policy] pause_mode = keep, or enable_partial_rollout",
    "filtered": "let is_valid_sample_fn filter by what does not grow with the length",
    "dropped": "raise [gateway] session_ttl_s",
    "pool": "set [policy] order = staleness",
    "overlong": "raise max_sequence_tokens, or lower the max_tokens of the task",
    "truncated": "set mask_truncated = false, or raise max_tokens",
    "stale": "raise max_token_staleness",
}
"""What takes long responses away (buffer/control/length_counts.py), and what can be done."""

MOST_BIAS = 0.1
"""The mean trained length may be this much below the mean started one."""


def length_bias(run: Window) -> Iterator[Finding]:
    """Find long responses that are lost; those of equal rewards have no gradient by nature."""
    metrics = run.steps[-1].metrics if run.steps else {}
    for task in run.tasks("length_bias/mean"):
        ratio = {name: metrics.get(f"length_bias/{name}/{task}", 1.0) for name in LOSSES}
        mean, tail, equal = (
            metrics.get(f"length_bias/{name}/{task}", 1.0)
            for name in ("mean", "tail", "no_advantage")
        )
        if not mean / max(1e-9, equal) < 1 - MOST_BIAS:
            continue
        series = run.series(f"length_bias/mean/{task}")
        since = series.since(lambda means: means < 1 - MOST_BIAS, 1)
        worst = min(LOSSES, key=lambda name: ratio[name])
        is_known = ratio[worst] < 1
        yield Finding(
            f"task {task} learns to be short: responses with a gradient have "
            f"{mean / max(1e-9, equal):.0%} of the mean length of those that were started, and "
            f"{tail:.0%} of the longest twentieth are left; most of it was lost to "
            f"{worst if is_known else 'nothing that is counted'}",
            LOSSES[worst].replace("TASK", task) if is_known else "",
            since or run.steps[-1].step,
            (f"length_bias/mean/{task}", f"length_bias/tail/{task}"),
            task=task,
        )
