"""`python -m benchmarks.learning.distill`: a student learns from a teacher, and by GRPO alone.

The teacher is a small model that demonstrations have taught running sums of eight digits. The
student has its size, and a warm start that ended early. The worker adds the teacher's values to the
groups that it submits. A finished trial is one line of `distill.jsonl`, and is not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import orjson
import torch
import typer

from benchmarks.learning.__main__ import RESULTS, missing
from benchmarks.learning.fleet import TASK, Fleet, serving
from benchmarks.learning.plot import smooth
from benchmarks.learning.sampler import Sampler
from benchmarks.learning.sums import LONG_SUMS, make_model
from benchmarks.learning.trial import Point, Setting, train
from buffer.control.control import ControlState
from buffer.ids import group_id, new_nonce
from buffer.job import Job
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.policy.policy import Policy

TEACHER, TOP_K = "big", 8
MODELS = Path(__file__).parents[2] / "build" / "distill"
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantages": "grpo"},
    "teacher": {"advantages": "none", "distillation": {}},
    "grpo and teacher": {"advantages": "grpo", "distillation": {}},
    "top 8 of the teacher": {
        "advantages": "none",
        "distillation": {"coef": 0.0, "top_k_loss": "reverse"},
    },
}


@dataclass(frozen=True, slots=True)
class Trial:
    arm: str
    seed: int
    steps: int


class TaughtFleet(Fleet):
    """Adds the values of a teacher to what it samples."""

    def __init__(self, run: Run, sampler: Sampler, setting: Setting, teacher: Path) -> None:
        super().__init__(run, sampler, setting.k, setting.batch)
        self._teacher = load_model(teacher).eval()

    def _sample(self, state: ControlState) -> list[tuple[Job, RolloutGroup]]:
        made = super()._sample(state)
        jobs = [job for job, _ in made]
        return list(zip(jobs, self._score([group for _, group in made]), strict=True))

    @torch.no_grad()
    def _score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with the teacher's values, from one pass (prompts have one length)."""
        members = [group.states for group in groups]
        states = [state for own in members for state in own]
        if not states:
            return []
        prompt = len(groups[0].prompt_ids)
        ids = torch.zeros(len(states), prompt + LONG_SUMS.max_tokens, dtype=torch.long)
        prompts = [group.prompt_ids for group in groups for _ in range(len(group))]
        for row, before, state in zip(ids, prompts, states, strict=True):
            given = np.concatenate([before, state.response_ids]).astype(np.int64)
            row[: len(given)] = torch.from_numpy(given)
        found = self._teacher(ids).logits[:, prompt - 1 : -1].float().log_softmax(-1)
        for logprobs, row, state in zip(found, ids, states, strict=True):
            size = len(state.response_ids)
            own, tops = logprobs[:size], logprobs[:size].topk(TOP_K)
            sampled = own.gather(1, row[prompt : prompt + size, None])[:, 0]
            state.teacher_logprobs = {TEACHER: sampled.numpy()}
            state.teacher_top_ids = {TEACHER: tops.indices.int().numpy()}
            state.teacher_top_logprobs = {TEACHER: tops.values.numpy()}
        return [group.continued(own) for group, own in zip(groups, members, strict=True)]


def run_arm(url: str, trial: Trial, model: Path, teacher: Path | None, folder: Path) -> list[Point]:
    """Return the points of a trial."""
    options = dict(ARMS[trial.arm])
    advantages = options.pop("advantages")
    setting = Setting(seed=trial.seed, steps=trial.steps)
    config = LearnerConfig.model_validate({"learning_rate": 1e-3, "warmup_steps": 5} | options)
    controller = TrainController(Policy(model, config, seed=trial.seed), advantages)
    limits = RunLimits(
        stale_threshold=1,
        steps=trial.steps,
        batch_size=setting.batch,
        tasks={TASK: TaskLimits()},
    )
    store = Store(url)
    initial = PolicyVersion("initial", 0)
    run = Run.create(store, f"distill-{new_nonce()[:6]}", new_nonce(), limits, initial, str(model))
    sampler = Sampler(model, setting.k, setting.seed, LONG_SUMS)
    fleet = (
        TaughtFleet(run, sampler, setting, teacher)
        if teacher
        else Fleet(run, sampler, setting.k, setting.batch)
    )
    try:
        with serving(run, fleet):
            return train(run, controller, setting, folder, model)
    finally:
        store.close()


def teacher_of(folder: Path) -> Path:
    config = LONG_SUMS.warm_start.model_copy(update={"stop_accuracy": 0.85, "seed": 1})
    return make_model(folder / "teacher", replace(LONG_SUMS, warm_start=config))


def accuracy_of(model: Path, problems: int = 512) -> float:
    """Return the share of problems that a model answers right when it samples."""
    sampler = Sampler(model, 1, 0, LONG_SUMS)
    asked = [sampler.prompt(group_id(TASK, draw)) for draw in range(problems)]
    answers = sampler.answer(asked, PolicyVersion("teacher", 0))
    return float(np.mean([group.scores for group in answers]))


def plot_trials(lines: Path, accuracy: float, file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = [orjson.loads(line) for line in lines.read_bytes().splitlines()]
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for arm in ARMS:
        rewards = [smooth(t["reward"], 4) for t in found if t["setting"]["arm"] == arm]
        if not rewards:
            continue
        table = np.array([reward[: min(map(len, rewards))] for reward in rewards])
        steps = np.arange(1, table.shape[1] + 1)
        (line,) = axis.plot(steps, table.mean(0), label=f"{arm} (n = {len(table)})")
        axis.fill_between(
            steps, table.min(0), table.max(0), color=line.get_color(), alpha=0.15, linewidth=0
        )
    axis.axhline(accuracy, color="black", linestyle=":", label="the teacher itself")
    axis.set(xlabel="train step", ylabel="share of right answers, mean of 4 steps", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize="small")
    figure.savefig(file, dpi=100)
    plt.close(figure)


def steps_to(rewards: list[float], accuracy: float) -> int | None:
    """Return the first step at which the mean of 4 steps is within 0.02 of `accuracy`."""
    reached = np.flatnonzero(smooth(rewards, 4) >= accuracy - 0.02)
    return int(reached[0]) + 1 if len(reached) else None


def main(
    arms: Annotated[str, typer.Option(help="names in ARMS, with commas")] = ",".join(ARMS),
    seeds: Annotated[int, typer.Option(min=1)] = 2,
    steps: Annotated[int, typer.Option(min=1, help="of GRPO; a taught student gets half")] = 120,
    folder: Annotated[Path, typer.Option(help="where the models go")] = MODELS,
    results: Annotated[Path, typer.Option(help="where distill.jsonl and distill.png go")] = RESULTS,
) -> None:
    """Teach a small model to do sums."""
    torch.set_num_threads(1)
    results.mkdir(parents=True, exist_ok=True)
    file = results / "distill.jsonl"
    trials = [
        Trial(arm, seed, steps if arm == "grpo" else steps // 2)
        for seed in range(1, seeds + 1)
        for arm in arms.split(",")
    ]
    with TemporaryDirectory() as temporary, EmbeddedServer(Path(temporary) / "server") as server:
        teacher = teacher_of(folder)
        accuracy = accuracy_of(teacher)
        typer.echo(f"the teacher answers {accuracy:.1%} right")
        student = make_model(folder / "student", LONG_SUMS)
        for trial in missing(trials, file):
            work = Path(temporary) / f"{trial.arm}-{trial.seed}"
            given = None if trial.arm == "grpo" else teacher
            rewards = [p["reward"] for p in run_arm(server.url, trial, student, given, work)]
            line = {"setting": asdict(trial), "reward": [round(each, 4) for each in rewards]}
            typer.echo(f"{trial.arm}, seed {trial.seed}: {rewards[0]:.2f} to {rewards[-1]:.2f}")
            with file.open("ab") as lines:
                lines.write(orjson.dumps(line) + b"\n")
    for line in map(orjson.loads, file.read_bytes().splitlines()):
        reached = steps_to(line["reward"], accuracy)
        typer.echo(f"{line['setting']}: as good as the teacher at step {reached}")
    plot_trials(file, accuracy, results / "distill.png")


if __name__ == "__main__":
    typer.run(main)
