"""TRL's `GRPOTrainer` on a run: its optimizer, losses and logging, with the workers' rollouts.

rolloutmq run configs/demo.toml --set run.name=trl --set policy.max_staleness=0 --set
trainer.loop=consumer.examples.trl_grpo:train

TRL requests a generation once per optimizer step, through its hook `rollout_func`. The hook takes
the batch of that step, and only counts the prompts that TRL passes. A checkpoint of TRL's also
contains the position of the run, and only then is the step committed; after a crash the same
command continues from there, and later steps are delivered again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from buffer.batches.position import Position
from buffer.config.config import TrainingConfig
from buffer.errors import ConfigError
from buffer.rollouts.group import RolloutGroup
from buffer.run import Run
from buffer.weights.shared_folder import FolderSender
from consumer.examples.plain_loop import check_temperature
from consumer.models.model_folder import load_model, load_tokenizer
from consumer.publication import publish
from consumer.rollout_consumer import RolloutConsumer
from consumer.training.step_log import StepWriter

POSITION = "rolloutmq.json"
"""Name of the position's file in TRL's checkpoint folders; a folder without it is incomplete."""


class QueueRollouts(TrainerCallback):  # type: ignore[misc]
    """Connect TRL to a run: a hook that takes batches, and callbacks that commit and publish.

    Usage:

        queue = QueueRollouts(run, config, position)
        GRPOTrainer(..., rollout_func=queue.rollouts, callbacks=[queue])
    """

    def __init__(self, run: Run, config: TrainingConfig, position: Position) -> None:
        self.consumer = RolloutConsumer(run)
        self.position = position
        self._run = run
        self._config = config
        self._weights = FolderSender(config.run.folder / "weights")
        self._log = StepWriter(config.run.folder)

    def rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return the next batch as TRL's `rollout_func` does.

        One entry per rollout in each column, with the `num_generations` of a group in a row.
        """
        step = self.position.step + 1
        batch = self.consumer.take_batch(step, self._run.limits.mix().shares(step))
        states = [state for group in batch.groups for state in group.states]
        if len(states) != len(prompts):
            raise ConfigError(
                f"step {step} has {len(states)} rollouts, and TRL requests {len(prompts)}",
                hint="per_device_train_batch_size * gradient_accumulation_steps must equal "
                "the rollouts of a batch of the run",
            )
        self.position.add(batch.manifest)
        scores = np.concatenate([group.scores for group in batch.groups])
        metrics = {"rewards/mean": float(scores.mean())}
        self._log.add_step(step, self.consumer.lineage, batch.manifest.gids, metrics)
        prompt_ids = [group.prompt_ids.tolist() for group in batch.groups for _ in group.states]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [state.response_ids.tolist() for state in states],
            "logprobs": [state.logprobs.tolist() for state in states],
            "env_mask": [mask.tolist() for group in batch.groups for mask in _masks(group)],
            "score": scores.tolist(),
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the weights of this lineage before the first step."""
        self._publish(kwargs["model"], kwargs["processing_class"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the weights after an optimizer step."""
        self._publish(kwargs["model"], kwargs["processing_class"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the position to a checkpoint that TRL has written, then commit it (I6)."""
        folder = Path(args.output_dir)
        file = folder / f"checkpoint-{state.global_step}" / POSITION
        file.with_suffix(".tmp").write_text(self.position.model_dump_json(), encoding="utf-8")
        file.with_suffix(".tmp").replace(file)
        self.consumer.commit(self.position.step, keep=complete_checkpoints(folder)[0])

    def _publish(self, model: Any, tokenizer: Any) -> None:
        def save(folder: Path) -> None:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        pause = self._config.policy.pause_mode
        publish(self.consumer, self._weights, self.position.step, save, pause=pause)


def judged(prompts: Any, completions: Any, score: list[float], **_: Any) -> list[float]:
    """Return the scores of the run's judges, as TRL's reward function."""
    return score


def complete_checkpoints(folder: Path) -> list[int]:
    """Return the steps of TRL's checkpoints that contain a position, oldest first."""
    files = folder.glob(f"checkpoint-*/{POSITION}")
    return sorted(int(file.parent.name.rpartition("-")[2]) for file in files)


def train(run: Run, config: TrainingConfig, model_dir: Path, *, take_over: bool = False) -> None:
    """Train from TRL's newest checkpoint to the last step of the plan."""
    check_temperature(config)
    _check_on_policy(run)
    folder = config.run.folder / "trl"
    steps = complete_checkpoints(folder)
    newest = folder / f"checkpoint-{steps[-1]}" if steps else None
    position = Position()
    if newest:
        position = Position.model_validate_json((newest / POSITION).read_bytes())
    queue = QueueRollouts(run, config, position)
    queue.consumer.open(position=position, take_over=take_over)
    if newest:
        # the last trainer may have died between its checkpoint and the commit
        queue.consumer.commit(position.step, keep=steps[0])
    group_size = _group_size(config)
    rollouts = config.plan.batch_size * group_size
    arguments = _arguments(config, folder, rollouts, group_size)
    trainer = GRPOTrainer(
        model=load_model(model_dir),
        processing_class=load_tokenizer(model_dir),
        reward_funcs=judged,
        args=arguments,
        # only counted: the producer decides which prompts are drawn
        train_dataset=Dataset.from_dict({"prompt": ["from the queue"] * rollouts}),
        rollout_func=queue.rollouts,
        callbacks=[queue],
    )
    trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    queue.consumer.finish()
    queue.consumer.close()


def _check_on_policy(run: Run) -> None:
    """Refuse stale rollouts: TRL takes its own newest weights for the policy that sampled."""
    oldest = max(run.limits.horizon(task) for task in run.limits.training_tasks)
    if oldest > 1:
        raise ConfigError(
            f"rollouts of this run may be {oldest - 1} steps old, and TRL corrects for the weights "
            "that sampled only rollouts of its own vLLM",
            hint="set [policy] max_staleness = 0, or use the reference trainer",
        )


def _group_size(config: TrainingConfig) -> int:
    sizes = {task.prompt_repeat_k for task in config.tasks.values() if task.eval_of is None}
    if len(sizes) > 1:
        raise ConfigError(
            f"TRL has one num_generations for all tasks, and prompt_repeat_k is {sorted(sizes)}",
            hint="set the same prompt_repeat_k for all tasks",
        )
    return sizes.pop()


def _arguments(config: TrainingConfig, folder: Path, rollouts: int, group_size: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=config.plan.steps,
        per_device_train_batch_size=rollouts,
        num_generations=group_size,
        max_completion_length=max(task.sample.max_tokens for task in config.tasks.values()),
        learning_rate=config.learner.learning_rate,
        save_steps=config.trainer.checkpoint_every_steps,
        save_total_limit=2,
        loss_type="dapo",
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=config.run.seed,
    )


def _masks(group: RolloutGroup) -> list[NDArray[np.uint8]]:
    """Return the mask of each rollout, uint8[R]: 0 for tokens of tools and for too old ones."""
    return np.split(group.mask, group.lengths.cumsum()[:-1])
