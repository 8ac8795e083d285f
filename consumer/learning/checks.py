"""Findings that compare several metrics, each by a function."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from consumer.learning.window import PATIENCE, STEPS, LearningFinding, Series, Window

FALLEN, STRETCH = 0.4, 5
"""The share that a reward loses of its best level, which it had in so many steps in a row."""

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

SAME_POLICY = "the same dtype, attention, chat template and temperature in engine and trainer"
SLOWER = "a lower learning rate, a smaller max_staleness"
BACK = f"{SLOWER}; continue from a checkpoint before it"

AT_LIMIT = 0.3
"""Share of truncated responses; `doctor` warns from 0.1 on, also where the reward does not fall."""

GROWTH, LEAST_GROWTH = 1.5, 4.0
"""Factor and tokens by which responses grow (Dr. GRPO, arXiv:2503.20783, on why they do)."""

MOST_BIAS = 0.1
"""The mean trained length may be this much below the mean started one."""

LOSSES = {
    "expired": "`rolloutmq set tasks.TASK.on_straggler=wait`, or a larger max_staleness",
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


def reward_falls(run: Window) -> Iterator[LearningFinding]:
    """Find tasks whose reward is far below what it was."""
    for task in run.by_task("reward_range") or ("",):
        reward, of_task = run.reward(task), f" of task {task}" if task else ""
        if len(reward.values) < STRETCH + PATIENCE:
            continue
        stretches = sliding_window_view(reward.values[:-PATIENCE], STRETCH)
        best, now = float(stretches.min(axis=1).max()), reward.mean()
        noise = np.diff(reward.values).std() / math.sqrt(2)  # of a step
        if best - now > max(FALLEN * abs(best), 2 * noise):
            below = partial(np.greater, (best + now) / 2)
            yield LearningFinding(
                "reward_falls",
                f"the reward{of_task} fell from {best:.2g} to {now:.2g}",
                BACK,
                reward.since(below, STRETCH) or reward.steps[-1],
                (run.reward_of(task), "policy/kl_old", "policy/entropy", *run.groups(task)),
                task=task,
            )


def equal_rewards(run: Window) -> Iterator[LearningFinding]:
    """Find tasks whose rewards are all equal."""
    for task, series in run.by_task("reward_range").items():
        since = series.since(lambda means: means == 0)
        if since is None:
            continue
        reward, n = run.reward(task), sum(step >= since for step in series.steps)
        value, before, was = reward.mean(), reward.values[:-n], ""
        has_learned = value >= NEARLY_SOLVED and reward.values.min() < 0.9 * value
        fix = "harder prompts, or a judge that sees differences between these responses"
        if len(before) and (before > value).mean() > 0.5:
            was, fix = f" (before, {before.mean():.2g})", BACK
        elif value <= 0:
            fix = "does the judge read these responses as you do (`rolloutmq rejudge GID`)? If it "
            fix += "does, the task is too hard: easier prompts, partial credit, or a warm start"
        yield LearningFinding(
            "equal_rewards",
            f"all rewards of task {task} are {value:.3g} for {n} steps{was}: nothing is learned",
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
        is_solved, first = reward >= NEARLY_SOLVED, series.values[0]
        why = ": it is nearly solved" if is_solved else ""
        fix = "prompts of medium difficulty for this model, more rollouts for each "
        fix += "(prompt_repeat_k), partial credit, or is_valid_sample_fn to draw others instead"
        if first < NO_ADVANTAGE / 2 and not is_solved:
            why, fix = f", at first {first:.0%}: their responses became alike", BACK
        yield LearningFinding(
            "no_advantage",
            f"{series.mean():.0%} of the groups of task {task} have equal rewards (mean "
            f"{reward:.2g}){why}",
            fix,
            since,
            (f"equal_groups/{task}", run.reward_of(task), *run.groups(task)),
            "note" if is_solved else "warning",
            task,
        )


def entropy(run: Window) -> Iterator[LearningFinding]:
    """Find a policy that is certain before it has learned the task, or that writes noise."""
    series, reward = run.series("policy/entropy"), run.reward().mean()
    change = run.reward().change(40, fewest=12)
    if len(series.values) < 2 * PATIENCE or (change and change.z > 2):
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
            f"a larger clip_high (DAPO), a small entropy_coef, temperature 1; {BACK}",
            since,
            look,
        )
    since = series.since(lambda means: means > ceiling)
    if since is not None:
        yield LearningFinding(
            "entropy_explosion",
            f"entropy rose from {lowest:.2g} to {now:.2g} nats per token without a better reward",
            f"does the judge pay for noise? entropy_coef = 0; {BACK}",
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
            f"the policy jumped at step {step}, or its rollouts were old: their KL is "
            f"{newest.max():.2g} (median {median:.2f})",
            f"{SLOWER}, fewer updates_per_batch",
            step,
            ("policy/kl_old", "staleness/mean", f"rolloutmq batch {step}"),
        )


def mismatch(run: Window) -> Iterator[LearningFinding]:
    """Find rollouts whose log-probabilities are not those of the policy that trains on them."""
    kl, old = run.series("mismatch/kl"), np.nan_to_num(run.series("staleness/mean").mean())
    since = kl.since(lambda means: means > KL * (1 + old))
    if since is not None:
        yield LearningFinding(
            "mismatch",
            f"rollouts are not of the policy that trains on them: their KL is {kl.mean():.2g} at a "
            f"staleness of {old:.1f}",
            SAME_POLICY if old < 0.5 else f"{SLOWER}; if step 1 has it too, {SAME_POLICY}",
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
            f"went from {reward.early:.2g} to {reward.late:.2g}",
            "does the judge pay for length? overlong_buffer_tokens, a smaller entropy_coef, "
            "[learner.loss] aggregation = token_mean or fixed_length",
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
        reward = run.series("rewards/mean", first + 1).change(STEPS, 2 * PATIENCE, PATIENCE)
        if best - accuracy > max(0.03, chance) and reward and reward.z > 2:
            yield LearningFinding(
                "held_out_falls",
                f"{task} fell from {best:.2f} after step {first} to {accuracy:.2f} after step "
                f"{last}, while the reward rose from {reward.early:.2g} to {reward.late:.2g}: the "
                "judge is exploited, or the prompts are learned by heart",
                "read what gets a high reward; make the judge stricter, use more prompts, kl_coef; "
                f"continue from step {first}",
                first,
                ("eval/accuracy", "rewards/mean", f"rolloutmq batch {run.steps[-1].step}"),
                task=task,
            )


def length_bias(run: Window) -> Iterator[LearningFinding]:
    """Find long responses that are lost; those of equal rewards have no gradient by nature."""
    metrics = run.steps[-1].metrics
    for task, series in run.by_task("length_bias/mean").items():
        ratio = {
            name: metrics.get(f"length_bias/{name}/{task}", 1.0)
            for name in (*LOSSES, "mean", "tail", "no_advantage")
        }
        least = (1 - MOST_BIAS) * ratio["no_advantage"]
        if ratio["mean"] < least:
            worst = min(LOSSES, key=ratio.__getitem__)
            cause = worst if ratio[worst] < 1 else "unknown"
            yield LearningFinding(
                "length_bias",
                f"task {task} learns to be short: what is trained has {ratio['mean']:.0%} of the "
                f"mean length of what was started, and {ratio['tail']:.0%} of its longest "
                f"twentieth; lost most often: {cause}",
                LOSSES.get(cause, "compare started_len with trained_len").replace("TASK", task),
                series.since(partial(np.greater, least), 1) or run.steps[-1].step,
                (f"length_bias/mean/{task}", f"length_bias/tail/{task}"),
                task=task,
            )
