"""Train small models for real, some with a fault, and record their metrics: `runs/*/NAME.json`.

`python -m tests.consumer.learning.small_runs [NAME …]` makes the files anew, a minute of a core for
each. The loop is sampler and learner in one process; some are of whole runs instead:
`python -m tests.consumer.learning.small_runs --of runs/demo healthy/demo`.
healthy/demo: `configs/demo.toml`, 50 steps; faults/demo-fast: at a learning rate of 1e-2, 40 steps;
faults/one-constant: with a second task, of two terms, whose judge gives 0.5 to everything, 24 steps.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import orjson
import torch

from benchmarks.learning.sampler import Sampler
from benchmarks.learning.sums import RUNNING_SUMS, SUMS, Problems, make_model, two_terms
from buffer.control.length_counts import FINISHED, LengthCounts, length_bias
from buffer.ids import group_id
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState
from consumer.config.learner import LearnerConfig, LossConfig
from consumer.grpo.learner.batch_filter import BatchFilter
from consumer.grpo.learner.losses import Surrogate, TokenColumns
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy.policy import Policy
from consumer.grpo.reporting.metrics import BatchColumns
from consumer.handle.step_log import TrainedStep, read_evaluations, read_steps
from rolloutmq.config.small_model import WarmStartConfig
from rolloutmq.extensions.demo.tiny_model import build_tiny_model
from rolloutmq.extensions.demo.warm_start import Demonstration

RUNS = Path(__file__).parent / "runs"
FAMILIES = (
    *("rewards/mean", "rewards/TASK", "reward_", "equal_groups/", "same_response/", "looping"),
    *("at_limit", "judge_disagreement/", "policy/", "mismatch/kl", "mismatch/ess"),
    *(
        "mismatch/dropped_fraction",
        "staleness/mean",
        "optim/",
        "response_len/mean",
        "batch/",
        "length_bias/",
    ),
)

Judge = Callable[[RolloutState, str], dict[str, float]]


HELD_OUT = 99  # seed of the problems of evaluations


def eight(number: int, seed: int = 0) -> Demonstration:
    """One of eight problems, which are easily learned by heart, but for held-out ones."""
    return two_terms(number if seed == HELD_OUT else number % 8, seed)


FILLER = ".,;:"


def wordy(number: int, seed: int = 0) -> Demonstration:
    """`3 - 4 =`, answered by `-1` after up to six characters that say nothing."""
    asked, draw = two_terms(number, seed), random.Random(f"wordy/{seed}/{number}")
    return Demonstration(
        asked.messages, "".join(draw.choices(FILLER, k=draw.randrange(7))) + asked.answer
    )


ROOMY = Problems(two_terms, 24, WarmStartConfig(stop_accuracy=0.4, seed=1))
FEW_SUMS = replace(SUMS, demonstrate=eight)
WORDY = Problems(wordy, 24, WarmStartConfig(stop_accuracy=1, max_steps=400, seed=1))


def right(state: RolloutState, said: str) -> dict[str, float]:
    return {"score": float(said == state.ground_truth)}


def always(value: float) -> Judge:
    return lambda state, said: {"score": value}


def close(state: RolloutState, said: str) -> dict[str, float]:
    """Partial credit: the sign or the last digit."""
    truth = str(state.ground_truth)
    form = float(said.lstrip("-").isdigit())
    correct = float(said == truth)
    return {"score": 0.8 * correct + 0.2 * form, "correct": correct, "form": form}


def form_and_noise(state: RolloutState, said: str) -> dict[str, float]:
    """The judge reads the wrong column of the data set: only the form can be learned."""
    form = len(said) / 24
    correct = float(said == "seven")
    return {"score": 0.5 * correct + 0.5 * form, "correct": correct, "form": form}


def eights(state: RolloutState, said: str) -> dict[str, float]:
    return {"score": said.count("8") / 24}


def starts_with_eight(state: RolloutState, said: str) -> dict[str, float]:
    return {"score": float(said.startswith("8"))}


def coin(state: RolloutState, said: str) -> dict[str, float]:
    is_right = said == state.ground_truth
    return {"score": float(is_right != (random.random() < 0.2))}


def chance(state: RolloutState, said: str) -> dict[str, float]:
    return {"score": float(random.random() < 0.5)}


def prefers_long() -> Judge:
    """Compares: a right response wins if it is longer than half of those before."""
    lengths = deque([4] * 65, 65)

    def judge(state: RolloutState, said: str) -> dict[str, float]:
        is_long = len(said) > sorted(lengths)[32]
        lengths.append(len(said))
        return {"score": ends_right(state, said)["score"] * is_long}

    return judge


def ends_right(state: RolloutState, said: str) -> dict[str, float]:
    return {"score": float(said.lstrip(FILLER) == str(state.ground_truth).lstrip(FILLER))}


def sharp(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Weigh by the exponential of the advantage: float32 overflows at those above 1.77."""
    ratio = columns.ratio()
    weights = torch.exp(columns.advantages / 0.02)
    return Surrogate(-weights * ratio, ratio, torch.zeros_like(ratio))


def by_prompt(state: RolloutState, said: str) -> dict[str, float]:
    """One prompt of ten decides anything; the others are too hard or too easy."""
    assert state.prompt_ids is not None
    draw = sum(state.prompt_ids.tolist()) % 20
    return right(state, said) if draw < 2 else {"score": float(draw % 2)}


@dataclass(frozen=True)
class Recipe:
    problems: Problems = SUMS
    judge: Judge = right
    rate: float = 1e-3
    seed: int = 0
    steps: int = 40
    batch: int = 8
    staleness: int = 0
    learner: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    is_random: bool = False
    of_engine: float = 1.0
    """factor of the engine's log-probabilities: 1 for an engine that is right"""
    evaluate_every: int = 0
    mask_truncated: bool = False
    late: dict[int, int] = field(default_factory=dict)
    """staleness of single batches, by step"""


HEALTHY = {
    "sums-0": Recipe(evaluate_every=10),
    "sums-1": Recipe(seed=1, evaluate_every=10),
    "sums-2": Recipe(seed=2, rate=5e-4),
    "sums-long": Recipe(seed=4, batch=16, steps=80, evaluate_every=20),
    "stale": Recipe(seed=5, staleness=4),
    "cispo": Recipe(seed=6, loss={"objective": "cispo"}),
    "gspo": Recipe(seed=7, loss={"objective": "gspo"}),
    "running": Recipe(RUNNING_SUMS, seed=8),
    "credit": Recipe(judge=close, seed=9, evaluate_every=10),
    "updates": Recipe(
        seed=10, learner={"updates_per_batch": 4, "old_policy": "current"}, rate=5e-4
    ),
    "roomy": Recipe(ROOMY, seed=12),
    "benchmark": Recipe(seed=13, batch=32, staleness=1, steps=60),
}
FAULTS = {
    "small-batch": Recipe(seed=11, batch=4, steps=80),
    "sums-fast": Recipe(seed=3, rate=3e-3),
    "zero": Recipe(judge=always(0.0), steps=20),
    "ones": Recipe(judge=always(1.0), steps=20),
    "untrained": Recipe(ROOMY, is_random=True, steps=30),
    "few-groups": Recipe(judge=by_prompt, steps=40),
    "collapse": Recipe(rate=2e-2, steps=40),
    "drift": Recipe(judge=chance, rate=3e-3, steps=60),
    "too-stale": Recipe(staleness=12, rate=3e-3),
    "huge-rate": Recipe(rate=0.3, steps=40),
    "clipped": Recipe(learner={"max_grad_norm": 1e-3}, steps=40),
    "broken-engine": Recipe(of_engine=1e30, learner={"max_skipped_updates": 1000}, steps=12),
    "many-updates": Recipe(
        rate=2e-2, learner={"updates_per_batch": 16, "old_policy": "current"}, steps=30
    ),
    "wrong-engine": Recipe(of_engine=0.6, loss={"importance_mode": "mask"}, steps=40),
    "eights": Recipe(ROOMY, judge=eights, steps=50),
    "exploited": Recipe(judge=starts_with_eight, evaluate_every=10),
    "coin": Recipe(judge=coin, steps=40),
    "form": Recipe(ROOMY, judge=form_and_noise),
    "rambling": Recipe(ROOMY, loss={"entropy_coef": 0.3}, steps=50),
    "growing": Recipe(WORDY, judge=prefers_long(), rate=3e-4, steps=50),
    "overflow": Recipe(
        loss={"objective": "tests.consumer.learning.small_runs:sharp"},
        learner={"max_skipped_updates": 1000},
        steps=12,
    ),
    "late": Recipe(rate=5e-4, late={35: 30}),
    "masked": Recipe(replace(SUMS, max_tokens=1), judge=close, mask_truncated=True, steps=15),
    "cut": Recipe(
        replace(WORDY, max_tokens=6), judge=ends_right, rate=3e-4, mask_truncated=True, steps=30
    ),
    "by-heart": Recipe(FEW_SUMS, rate=2e-3, steps=60, evaluate_every=10),
    "too-short": Recipe(
        Problems(RUNNING_SUMS.demonstrate, 4, RUNNING_SUMS.warm_start), seed=8, steps=40
    ),
}


class Judged(Sampler):
    def __init__(self, model: Path, recipe: Recipe) -> None:
        super().__init__(model, 8, recipe.seed, recipe.problems)
        self._recipe = recipe

    def hold(self, weights: dict[str, torch.Tensor]) -> None:
        self._model.load_state_dict(weights)

    def judged(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        for group in groups:
            for state in group.states:
                ids = [int(n) for n in state.response_ids if int(n) != self._end]
                state.reward = self._recipe.judge(state, self._tokenizer.decode(ids).strip())
                state.logprobs = (state.logprobs * self._recipe.of_engine).astype("<f4")
        return [RolloutGroup(group.gid, group.task, group.states) for group in groups]


def model_of(recipe: Recipe, folder: Path) -> Path:
    if not recipe.is_random:
        kinds = {wordy: WORDY, RUNNING_SUMS.demonstrate: RUNNING_SUMS}
        problems = kinds.get(recipe.problems.demonstrate, SUMS)
        own = folder / problems.demonstrate.__name__
        own.mkdir(exist_ok=True)
        return make_model(own, problems)
    from rolloutmq.config.small_model import TinyModelConfig

    path = folder / "random"
    if not path.exists():
        build_tiny_model(path, TinyModelConfig(phrases=(" + ", " - ", " =")), 1)
    return path


def train(recipe: Recipe, models: Path) -> dict[str, Any]:
    """Return the recorded run."""
    random.seed(recipe.seed)
    torch.set_num_threads(1)
    model = model_of(recipe, models)
    loss = LossConfig(**recipe.loss)
    config = LearnerConfig(learning_rate=recipe.rate, warmup_steps=5, loss=loss, **recipe.learner)
    controller = TrainController(
        Policy(model, config, seed=recipe.seed),
        batch_filter=BatchFilter(mask_truncated=recipe.mask_truncated),
    )
    started, trained = LengthCounts(), LengthCounts()
    sampler, exact = Judged(model, recipe), Judged(model, Recipe(recipe.problems, seed=HELD_OUT))
    steps, evaluations, weights = [], {}, []
    for step in range(1, recipe.steps + 1):
        state = controller.policy.model.state_dict()
        weights.append({name: tensor.clone() for name, tensor in state.items()})
        staleness = min(recipe.late.get(step, recipe.staleness), step - 1)
        sampler.hold(weights[-1 - staleness])
        gids = [group_id("sums", (step - 1) * recipe.batch + n) for n in range(recipe.batch)]
        prompts = [sampler.prompt(gid) for gid in gids]
        groups = sampler.judged(sampler.answer(prompts, PolicyVersion("local", step - 1)))
        if recipe.evaluate_every and (step - 1) % recipe.evaluate_every == 0:
            exact.hold(weights[-1])
            held = [exact.prompt(group_id("held", n)) for n in range(20)]
            answered = exact.answer(held, PolicyVersion("local", 0))
            accuracy = float(np.mean([group.scores.mean() for group in answered]))
            evaluations[step - 1] = {"eval/accuracy": accuracy, "eval/groups": 20.0}
        metrics = controller.fit(groups)
        columns = BatchColumns.of(groups, controller.advantages, controller.fates)
        started.add("sums", FINISHED, columns.lengths)
        for (task, fate), lengths in columns.lengths_by_fate().items():
            trained.add(task, fate, lengths)
        metrics |= length_bias(trained.by_task(), started.by_task()) | columns.metrics()
        metrics["staleness/mean"] = float(staleness)
        steps.append(TrainedStep(step, "a", tuple(gids), metrics))
    return compact(steps, {"held_out": evaluations} if evaluations else {})


def compact(steps: list[TrainedStep], evaluations: dict[str, Any]) -> dict[str, Any]:
    """Return a run as columns of the metrics that findings read, with four digits."""
    names = sorted({
        name for step in steps for name in step.metrics
        if any(name.startswith(family.removesuffix("TASK")) for family in FAMILIES)
    })  # fmt: skip
    return {
        "steps": [step.step for step in steps],
        "gid": steps[0].gids[0],
        "metrics": {name: [_short(step.metrics.get(name)) for step in steps] for name in names},
        "evaluations": evaluations,
    }


def _short(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.4g}")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--of"]:
        folder, name = Path(arguments[1]), arguments[2]
        found: dict[str, Any] = {}
        for (task, step), metrics in read_evaluations(folder).items():
            found.setdefault(task, {})[step] = metrics
        write(name, compact(read_steps(folder), found))
        return
    models = Path(gettempdir()) / "small-runs"
    models.mkdir(exist_ok=True)
    recipes = HEALTHY | FAULTS
    for name in arguments or recipes:
        run = train(recipes[name], models)
        write(f"{'faults' if name in FAULTS else 'healthy'}/{name}", run)


def write(name: str, run: dict[str, Any]) -> None:
    (RUNS / f"{name}.json").write_bytes(orjson.dumps(run, option=orjson.OPT_NON_STR_KEYS) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
