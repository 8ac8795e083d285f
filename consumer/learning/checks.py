"""Findings that compare several metrics, each by a function."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from consumer.learning.window import PATIENCE, LearningFinding, Series, Window

NO_ADVANTAGE = 0.8
"""Share of groups with equal rewards: a batch teaches as much as one of a fifth of its size. DAPO
(arXiv:2503.14476) draws others instead, TRL reports them as `frac_reward_zero_std`.
"""

NEARLY_SOLVED = 0.8
"""Mean reward from which on equal rewards and a low entropy mean that the task is learned."""

COLLAPSED, LOWEST_ENTROPY = 0.1, 0.01
"""Share of its start that is left, or nats per token. A reward is paid for with entropy
(arXiv:2505.22617: R = -a exp(H) + b), so that it is a finding only where the reward does not rise.
"""

EXPLODED, LEAST_RISE = 2.0, 0.5
"""Factor and nats by which entropy rises above its lowest."""

JUMP, TIMES = 0.3, 10.0
"""KL of one step, and how many medians it is. PPO stops an update at 0.015 to 0.03 (Spinning Up,
CleanRL); a tiny model at a staleness of 4 has 0.2 in single steps.
"""

KL = 0.05
"""At a staleness of 0, and as much more for each publication of staleness. Tinker calls below 0.01
stable; engines that compute in another dtype have a few thousandths.
"""

SAME_POLICY = (
    "the same dtype, attention and chat template in engine and trainer, a temperature that both "
    "know; a smaller max_staleness, or a lower learning rate where rollouts are old"
)

AT_LIMIT = 0.3
"""Share of truncated responses; `doctor` warns from 0.1 on, also where the reward does not fall."""

GROWTH, LEAST_GROWTH = 1.5, 4.0
"""Factor and tokens by which responses grow (Dr. GRPO, arXiv:2503.20783, on why they do)."""

MOST_BIAS = 0.1
"""The mean trained length may be this much below the mean started one."""

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


def equal_rewards(run: Window) -> Iterator[LearningFinding]:
    """Find tasks whose rewards are all equal."""
    for task, series in run.by_task("reward_range").items():
        since = series.since(lambda means: means == 0)
        if since is None:
            continue
        reward, steps = run.reward(task), sum(step >= since for step in series.steps)
        value = reward.mean()
        has_learned = value >= NEARLY_SOLVED and reward.values.min() < 0.9 * value
        fix = "harder prompts, or a judge that sees differences between these responses"
        if value <= 0:
            fix = "does the judge read these responses as you do (`rolloutmq rejudge GID`)? If it "
            fix += "does, the task is too hard: easier prompts, partial credit, or a warm start"
        yield LearningFinding(
            "equal_rewards",
            f"all rewards of task {task} are {value:.3g} for {steps} steps: nothing is learned",
            fix,
            since,
            (*run.groups(task), run.reward_of(task)),
            "note" if has_learned else "warning",
            task,
        )


def no_advantage(run: Window) -> Iterator[LearningFinding]:
    """Find tasks most of whose groups have equal rewards, and teach nothing."""
    # advantages that are not compared within a group may teach all the same
    is_trained = run.series("batch/trained_share").mean() > 1 - NO_ADVANTAGE / 2
    for task, series in run.by_task("equal_groups").items():
        since = series.since(lambda means: means > NO_ADVANTAGE)
        reward = run.reward(task).mean()
        if since is None or is_trained:
            continue
        is_solved = reward >= NEARLY_SOLVED
        why = f"it is nearly solved, mean reward {reward:.2f}" if is_solved else "no advantage"
        yield LearningFinding(
            "no_advantage",
            f"{series.mean():.0%} of the groups of task {task} have equal rewards: {why}",
            "prompts of medium difficulty for this model, more rollouts for each "
            "(prompt_repeat_k), partial credit, or is_valid_sample_fn to draw others instead",
            since,
            (f"equal_groups/{task}", run.reward_of(task), *run.groups(task)),
            "note" if is_solved else "warning",
            task,
        )


def skipped_updates(run: Window) -> Iterator[LearningFinding]:
    """Find optimizer steps that were skipped, since their gradient is not finite."""
    skipped = run.series("optim/skipped_updates")
    newest = skipped.values[-PATIENCE:]
    if newest.sum() > 0:
        yield LearningFinding(
            "gradient_not_finite",
            f"{newest.sum():.0f} optimizer steps of the last {len(newest)} train steps were "
            "skipped: their gradient is not finite",
            "a lower learning rate, and an older checkpoint: weights may be where gradients "
            "overflow; the trainer's log names the groups",
            skipped.steps[-len(newest) + int(np.argmax(newest > 0))],
            ("optim/skipped_updates", "optim/grad_norm"),
            "error" if newest[-3:].all() else "warning",
        )


def entropy(run: Window) -> Iterator[LearningFinding]:
    """Find a policy that is certain before it has learned the task, or that writes noise."""
    series, reward = run.series("policy/entropy"), run.reward().mean()
    if len(series.values) < 2 * PATIENCE or run.rises():
        return
    means = np.convolve(series.values, np.full(5, 0.2), "valid")
    start, lowest, now = float(means[0]), float(means.min()), series.mean()
    floor = max(COLLAPSED * start, LOWEST_ENTROPY)
    ceiling = max(EXPLODED * lowest, lowest + LEAST_RISE)
    since = series.since(lambda means: means < floor)
    look = ("policy/entropy", "rewards/mean", "optim/grad_norm")
    if since is not None and start > LOWEST_ENTROPY and not reward >= NEARLY_SOLVED:
        yield LearningFinding(
            "entropy_collapse",
            f"entropy fell from {start:.2g} to {now:.2g} nats per token, and the reward stays at "
            f"{reward:.2g}: nothing new is tried",
            "a lower learning rate, a larger clip_high (DAPO), a small entropy_coef, temperature "
            "1; continue from a checkpoint before it",
            since,
            look,
        )
    since = series.since(lambda means: means > ceiling)
    if since is not None:
        yield LearningFinding(
            "entropy_explosion",
            f"entropy rose from {lowest:.2g} to {now:.2g} nats per token without a better reward",
            "a lower learning rate, entropy_coef = 0; continue from a checkpoint before it",
            since,
            look,
        )


def policy_jump(run: Window) -> Iterator[LearningFinding]:
    """Find a batch that changed the policy by too much, or that an old policy sampled."""
    kl = run.series("policy/kl_old")
    newest = kl.values[-PATIENCE:]
    median = float(np.median(kl.values)) if len(kl.values) >= 2 * PATIENCE else math.inf
    if len(newest) and newest.max() > max(JUMP, TIMES * median):
        step = kl.steps[-len(newest) + int(newest.argmax())]
        yield LearningFinding(
            "policy_jump",
            f"the policy jumped at step {step}: its KL to the one that sampled is "
            f"{newest.max():.2g} (median {median:.2g})",
            "a lower learning rate, fewer updates_per_batch, a smaller max_staleness",
            step,
            ("policy/kl_old", "policy/ratio", f"rolloutmq batch {step}"),
        )


def mismatch(run: Window) -> Iterator[LearningFinding]:
    """Find rollouts whose log-probabilities are not those of the policy that trains on them."""
    kl, staleness = run.series("mismatch/kl"), run.series("staleness/mean").mean()
    old = 0.0 if math.isnan(staleness) else staleness
    since = kl.since(lambda means: means > KL * (1 + old))
    if since is not None:
        yield LearningFinding(
            "mismatch",
            f"rollouts are not of the policy that trains on them: their KL is {kl.mean():.2g} at a "
            f"staleness of {old:.1f}",
            SAME_POLICY,
            since,
            ("mismatch/kl", "mismatch/ess", "staleness/mean"),
        )


def response_limit(run: Window) -> Iterator[LearningFinding]:
    """Find responses that reach their token limit, and get less reward for it."""
    for task, series in run.by_task("at_limit").items():
        since = series.since(lambda means: means > AT_LIMIT)
        share, reward = series.mean(), run.reward(task).mean()
        cut = run.series(f"at_limit_reward/{task}").mean()
        others = (reward - share * cut) / (1 - share) if share < 1 else 0.0
        # a model that never ends its answers has no others with a reward
        if since is not None and (cut < 0.5 * others or (cut <= 0 and reward <= 0)):
            yield LearningFinding(
                "response_limit",
                f"{share:.0%} of the responses of task {task} reach their token limit, and get a "
                f"reward of {cut:.2g}, others {others:.2g}",
                f"a larger `tasks.{task}.sample.max_tokens`, or `overlong_buffer_tokens`; a model "
                "that does not end its answers needs a warm start",
                since,
                (f"at_limit/{task}", "response_len/mean", *run.groups(task)),
                task=task,
            )


def length_without_reward(run: Window) -> Iterator[LearningFinding]:
    """Find responses that grow while the reward does not."""
    length = run.series("response_len/mean")
    change, reward = length.change(100, 30), run.reward().change(100, 30)
    if change is None or reward is None or reward.z > 2 or change.z < 4:
        return
    if change.late > max(GROWTH * change.early, change.early + LEAST_GROWTH):
        middle = (change.early + change.late) / 2
        yield LearningFinding(
            "length_without_reward",
            f"responses grew from {change.early:.0f} to {change.late:.0f} tokens, and the reward "
            f"went from {reward.early:.3g} to {reward.late:.3g}",
            "[learner.loss] aggregation = token_mean or fixed_length, overlong_buffer_tokens, a "
            "smaller entropy_coef; does the judge reward length?",
            length.since(lambda means: means > middle) or length.steps[-1],
            ("response_len/mean", "rewards/mean", "policy/entropy"),
        )


def one_part(run: Window) -> Iterator[LearningFinding]:
    """Find a composed reward of which one part rises, and no other."""
    of_tasks: defaultdict[str, dict[str, Series]] = defaultdict(dict)
    for name, series in run.by_task("reward_part").items():
        task, _, part = name.partition("/")
        of_tasks[task][part] = series
    for task, parts in of_tasks.items():
        changes = {part: series.change(60, 30) for part, series in parts.items()}
        known = {part: change for part, change in changes.items() if change is not None}
        rising = [part for part, each in known.items() if each.z > 4 and each.late > each.early]
        still = [part for part, each in known.items() if each.z < 1 and each.late < NEARLY_SOLVED]
        if len(rising) == 1 and still and len(still) == len(known) - 1:
            part, rest = rising[0], ", ".join(f"{name} ({known[name].late:.2g})" for name in still)
            yield LearningFinding(
                "one_part",
                f"of the reward of task {task} only {part} rises, from {known[part].early:.2g} to "
                f"{known[part].late:.2g}, and not {rest}",
                f"give {part} less weight, or let it count only with {still[0]} (their product); "
                "advantages = gdpo normalizes each part by itself",
                parts[part].steps[-60:][0],
                tuple(f"reward_part/{task}/{name}" for name in (part, *still)),
                task=task,
            )


def held_out_falls(run: Window) -> Iterator[LearningFinding]:
    """Find held-out problems whose accuracy falls while the reward rises."""
    points: defaultdict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for (task, step), metrics in sorted(run.evaluations.items()):
        if isinstance(accuracy := metrics.get("eval/accuracy"), int | float):
            points[task].append((step, accuracy, max(1.0, metrics.get("eval/groups", 1.0))))
    for task, own in points.items():
        (first, best, _), (last, _, problems) = max(own, key=lambda point: point[1]), own[-1]
        # the best of many is that by chance as well: two of them must be below it
        accuracy = float(np.mean([point[1] for point in own[1:][-2:] or own]))
        # two standard errors of the difference of two shares of as many problems
        chance = 2 * math.sqrt(2 * max(0.0, best * (1 - best)) / problems)
        reward = run.series("rewards/mean", first + 1).change(200, 2 * PATIENCE)
        if best - accuracy > max(0.03, chance) and reward and reward.z > 2:
            yield LearningFinding(
                "held_out_falls",
                f"{task} fell from {best:.2f} after step {first} to {accuracy:.2f} after step "
                f"{last}, while the reward rose from {reward.early:.2g} to {reward.late:.2g}: the "
                "judge is exploited, or the prompts are learned by heart",
                "read what gets a high reward; make the judge stricter, use more prompts, kl_coef; "
                f"go back to the checkpoint of step {first}",
                first,
                ("eval/accuracy", "rewards/mean", f"rolloutmq batch {run.steps[-1].step}"),
                task=task,
            )


def length_bias(run: Window) -> Iterator[LearningFinding]:
    """Find long responses that are lost; those of equal rewards have no gradient by nature."""
    metrics = run.steps[-1].metrics
    for task, series in run.by_task("length_bias/mean").items():
        ratio = {name: metrics.get(f"length_bias/{name}/{task}", 1.0) for name in LOSSES}
        mean, tail, equal = (
            metrics.get(f"length_bias/{name}/{task}", 1.0)
            for name in ("mean", "tail", "no_advantage")
        )
        mean /= max(1e-9, equal)
        if mean < 1 - MOST_BIAS:
            worst = min(LOSSES, key=lambda name: ratio[name])
            is_known = ratio[worst] < 1
            cause = worst if is_known else "nothing that is counted"
            yield LearningFinding(
                "length_bias",
                f"task {task} learns to be short: responses with a gradient have {mean:.0%} of the "
                f"mean length of those that were started, and {tail:.0%} of the longest twentieth "
                f"are left; most of it was lost to {cause}",
                LOSSES[worst].replace("TASK", task) if is_known else "",
                series.since(lambda means: means < 1 - MOST_BIAS, 1) or run.steps[-1].step,
                (f"length_bias/mean/{task}", f"length_bias/tail/{task}"),
                task=task,
            )
