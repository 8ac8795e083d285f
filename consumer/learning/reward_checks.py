"""Findings about rewards and responses. Each check yields what it finds in the newest steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from consumer.learning.window import Finding, Series, Window

PATIENCE = 10
"""Steps for which something must last: single batches are noise."""

NO_ADVANTAGE = 0.8
"""Share of groups with equal rewards: a batch then teaches as much as one of a fifth of its size.
DAPO (arXiv:2503.14476) draws anew to avoid them; TRL reports them as `frac_reward_zero_std`.
"""

NEARLY_SOLVED = 0.8
"""Share of groups with a full score above which equal rewards mean that the task is learned."""

AT_LIMIT = 0.3
"""Share of truncated responses; `rolloutmq doctor` warns at 0.1 of a task's newest groups, this
also says what it does to the reward.
"""

SAME_RESPONSE = 0.9
"""Share of responses to different prompts that are one text. A yes/no task may have 0.7."""

LOOPING = 0.3
"""Share of responses that end in a loop. Small models do so in a few per cent; prime-rl and
MiniMax-M1 (arXiv:2506.13585) stop a response that does.
"""

DISAGREEMENT = 0.05
"""Share of repeated responses with another score. A judge that computes has 0; a model at
temperature 0 has about 0.01.
"""

GROWTH, LEAST_GROWTH = 1.5, 4.0
"""Factor and tokens by which responses grow (Dr. GRPO, arXiv:2503.20783, on why they do)."""


def equal_rewards(run: Window) -> Iterator[Finding]:
    """Find tasks whose rewards are all equal."""
    for task in run.tasks("reward_range"):
        series = run.series(f"reward_range/{task}")
        since = series.since(lambda means: means == 0, PATIENCE)
        if since is None:
            continue
        value = run.reward(task).mean(PATIENCE)
        has_learned = value >= NEARLY_SOLVED and run.reward(task).values.min() < 0.9 * value
        what = f"all rewards of task {task} are {value:.3g} for {_lasts(series, since)} steps"
        if value <= 0:
            fix = "does the judge read these responses as you do (`rolloutmq rejudge GID`)? If it "
            fix += "does, the task is too hard for this model: easier prompts, partial credit, or "
            fix += "a warm start on solved examples"
        else:
            fix = "use harder prompts, or a judge that sees differences between these responses"
        yield Finding(
            f"{what}: nothing is learned",
            fix,
            since,
            (*run.groups(task), run.rewards_of(task)),
            "note" if has_learned else "warning",
            task=task,
        )


def no_advantage(run: Window) -> Iterator[Finding]:
    """Find tasks most of whose groups have equal rewards, and teach nothing."""
    trained = run.series("batch/trained_share").mean(PATIENCE)
    for task in run.tasks("equal_groups"):
        series = run.series(f"equal_groups/{task}")
        since = series.since(lambda means: means > NO_ADVANTAGE, PATIENCE)
        is_known = run.series(f"reward_range/{task}").mean(PATIENCE) == 0  # equal_rewards
        # other advantages than those within a group may teach all the same
        if since is None or is_known or trained > 1 - NO_ADVANTAGE / 2:
            continue
        share, reward = series.mean(PATIENCE), run.reward(task).mean(PATIENCE)
        what = f"{share:.0%} of the groups of task {task} have equal rewards, and no advantage"
        look = (f"equal_groups/{task}", run.rewards_of(task), *run.groups(task))
        if reward >= NEARLY_SOLVED:
            what = f"task {task} is nearly solved (mean reward {reward:.2f}): {what}"
            yield Finding(what, "harder prompts teach more", since, look, "note", task=task)
        else:
            fix = "prompts of medium difficulty for this model, more rollouts for each "
            fix += "(prompt_repeat_k), partial credit, or is_valid_sample_fn to draw others instead"
            yield Finding(what, fix, since, look, task=task)


def response_limit(run: Window) -> Iterator[Finding]:
    """Find responses that reach their token limit, and get less reward for it."""
    for task in run.tasks("at_limit"):
        series = run.series(f"at_limit/{task}")
        since = series.since(lambda means: means > AT_LIMIT, PATIENCE)
        if since is None:
            continue
        share, reward = series.mean(PATIENCE), run.reward(task).mean(PATIENCE)
        cut = run.series(f"at_limit_reward/{task}").mean(PATIENCE)
        others = (reward - share * cut) / (1 - share) if share < 1 else math.nan
        is_hurt = cut < 0.5 * others if share < 1 else cut <= 0
        if is_hurt:
            more = f"{others:.2g} for the others" if share < 1 else "there are no others"
            yield Finding(
                f"{share:.0%} of the responses of task {task} reach their token limit, and get a "
                f"reward of {cut:.2g} ({more})",
                f"a larger `tasks.{task}.sample.max_tokens`, or `overlong_buffer_tokens`; a model "
                "that does not end its answers needs a warm start",
                since,
                (f"at_limit/{task}", "response_len/mean", *run.groups(task)),
                task=task,
            )


def length_without_reward(run: Window) -> Iterator[Finding]:
    """Find responses that grow while the reward does not."""
    length = run.series("response_len/mean")
    change, reward = length.change(100, 30), run.reward().change(100, 30)
    if change is None or reward is None or reward.z > 2:
        return
    if change.late > max(GROWTH * change.early, change.early + LEAST_GROWTH) and change.z > 4:
        limit = (change.early + change.late) / 2
        since = length.since(lambda means: means > limit, PATIENCE)
        yield Finding(
            f"responses grew from {change.early:.0f} to {change.late:.0f} tokens, and the reward "
            f"went from {reward.early:.3g} to {reward.late:.3g}",
            "[learner.loss] aggregation = token_mean or fixed_length, overlong_buffer_tokens, a "
            "smaller entropy_coef; does the judge reward length?",
            since or length.steps[-1],
            ("response_len/mean", "rewards/mean", "policy/entropy"),
        )


def same_response(run: Window) -> Iterator[Finding]:
    """Find a policy that writes one text whatever the prompt is."""
    for task in run.tasks("same_response"):
        series = run.series(f"same_response/{task}")
        since = series.since(lambda means: means > SAME_RESPONSE, 3)
        if since is not None:
            yield _exploit(
                run, task, f"{series.mean(3):.0%} of the responses of task {task} are one text, "
                "whatever the prompt is", run.reward(task).mean(3), since, f"same_response/{task}"
            )  # fmt: skip


def looping(run: Window) -> Iterator[Finding]:
    """Find responses that repeat the same few tokens to their end."""
    for task in run.tasks("looping"):
        series = run.series(f"looping/{task}")
        since = series.since(lambda means: means > LOOPING, 3)
        if since is not None:
            yield _exploit(
                run, task, f"{series.mean(3):.0%} of the responses of task {task} repeat the same "
                "few tokens to their end", run.series(f"looping_reward/{task}").mean(3), since,
                f"looping/{task}",
            )  # fmt: skip


def _exploit(run: Window, task: str, what: str, reward: float, since: int, metric: str) -> Finding:
    """Return the finding of a degenerate policy, which the judge may have rewarded."""
    is_paid = reward > 0 and reward >= run.reward(task).mean(3)
    fix = "a lower learning rate; continue from a checkpoint before it"
    return Finding(
        f"{what}; the judge gives them {reward:.2g}" if is_paid else what,
        f"a judge that does not pay for these, and {fix}" if is_paid else fix,
        since,
        (*run.groups(task), metric, run.rewards_of(task)),
        task=task,
    )


def judge_disagreement(run: Window) -> Iterator[Finding]:
    """Find a judge that scores equal responses to one prompt differently."""
    for task in run.tasks("judge_disagreement"):
        series = run.series(f"judge_disagreement/{task}")
        since = series.since(lambda means: means > DISAGREEMENT, PATIENCE)
        if since is not None:
            yield Finding(
                f"{series.mean(PATIENCE):.0%} of the responses of task {task} that repeat another "
                "of their group got a different score: the judge's noise is trained as advantages",
                "a judge at temperature 0, the mean of several judgements, or a coarser score; "
                "`rolloutmq rejudge GID` judges one again",
                since,
                (*run.groups(task), f"judge_disagreement/{task}"),
                task=task,
            )


def one_part(run: Window) -> Iterator[Finding]:
    """Find a composed reward of which one part rises, and no other."""
    by_task: dict[str, dict[str, Series]] = {}
    for name in run.tasks("reward_part"):
        task, _, part = name.partition("/")
        by_task.setdefault(task, {})[part] = run.series(f"reward_part/{name}")
    for task, parts in by_task.items():
        changes = {part: series.change(60, 40) for part, series in parts.items()}
        known = {part: change for part, change in changes.items() if change is not None}
        rising = [part for part, change in known.items() if change.z > 4 and change.by > 0.02]
        still = [part for part, change in known.items() if change.z < 1 and change.late < 0.9]
        if len(rising) == 1 and still and len(rising) + len(still) == len(known):
            (part,) = rising
            rest = ", ".join(f"{name} {known[name].late:.2g}" for name in still)
            yield Finding(
                f"of the reward of task {task} only {part} rises ({known[part].early:.2g} to "
                f"{known[part].late:.2g}); {rest} does not",
                f"give {part} less weight, or let it count only with {still[0]} (their product); "
                "advantages = gdpo normalizes each part by itself",
                parts[part].steps[max(0, len(parts[part].steps) - 60)],
                tuple(f"reward_part/{task}/{name}" for name in (part, *still)),
                task=task,
            )


def held_out_falls(run: Window) -> Iterator[Finding]:
    """Find held-out problems whose accuracy falls while the reward rises."""
    for task in sorted({task for task, _ in run.evaluations}):
        points = sorted(
            (step, metrics["eval/accuracy"], max(1.0, metrics.get("eval/groups", 1.0)))
            for (name, step), metrics in run.evaluations.items()
            if name == task and isinstance(metrics.get("eval/accuracy"), int | float)
        )
        if len(points) < 2:
            continue
        best, last = max(points, key=lambda point: point[1]), points[-1]
        # the best of many is the best by chance as well: two of them must be below it
        accuracy = float(np.mean([point[1] for point in points[1:][-2:]]))
        # two standard errors of the difference of two shares of as many problems
        chance = 2 * math.sqrt(2 * max(0.0, best[1] * (1 - best[1])) / last[2])
        reward = run.series("rewards/mean")
        after = reward.part(best[0] + 1).change(len(reward.values), fewest=2 * PATIENCE)
        if best[1] - accuracy > max(0.03, chance) and after and after.z > 2:
            yield Finding(
                f"{task} fell from {best[1]:.2f} after step {best[0]} to {accuracy:.2f} after step "
                f"{last[0]}, while the reward rose from {after.early:.2g} to {after.late:.2g}: the "
                "judge is exploited, or the prompts are learned by heart",
                "read what gets a high reward; make the judge stricter, use more prompts, kl_coef; "
                f"the checkpoint of step {best[0]} is the better one",
                best[0],
                (f"eval/accuracy/{task}", "rewards/mean", f"rolloutmq batch {run.steps[-1].step}"),
                task=task,
            )


def _lasts(series: Series, since: int) -> int:
    return sum(step >= since for step in series.steps)
