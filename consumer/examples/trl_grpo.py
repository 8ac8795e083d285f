"""TRL's `GRPOTrainer` on a run: its optimizer, losses and logging; our rollouts, through its `rollout_func` hook.

rolloutmq run configs/demo.toml --set run.name=trl --set trainer.loop=consumer.examples.trl_grpo:train

TRL asks for a generation once per optimizer step. We take the batch of that step, which workers made; what TRL hands us
as prompts is only counted. A checkpoint of TRL's holds our position, and only then is the step committed; after a
crash the same command goes on from there, and the steps behind it are delivered again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from buffer import RolloutGroup, Run
from buffer.errors import ConfigError
from buffer.recovery.position import Position
from buffer.weights.shared_folder import FolderSender
from consumer.config import TrainingConfig
from consumer.model_folder import load_model, load_tokenizer
from consumer.publication import publish
from consumer.rollout_consumer import RolloutConsumer
from consumer.step_log import StepWriter

POSITION = "rolloutmq.json"
"""In TRL's own checkpoint folders; one without it is not whole."""


class QueueRollouts(TrainerCallback):  # type: ignore[misc]
    """What stands between TRL and a run: the hook that takes, and the callbacks that commit and publish."""

    def __init__(self, run: Run, config: TrainingConfig, position: Position) -> None:
        self.consumer, self.position = RolloutConsumer(run), position
        self._run, self._config = run, config
        self._weights, self._log = FolderSender(config.run.folder / "weights"), StepWriter(config.run.folder)

    def rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: one column entry per rollout, groups of `num_generations` in a row."""
        step = self.position.step + 1
        batch = self.consumer.take_batch(step, self._run.limits.mix().shares(step))
        states = [state for group in batch.groups for state in group.states]
        if len(states) != len(prompts):
            raise ConfigError(
                f"step {step} has {len(states)} rollouts, and TRL asks for {len(prompts)}",
                hint="per_device_train_batch_size * gradient_accumulation_steps must be those of the run's batch",
            )
        self.position.add(batch.manifest)
        scores = np.concatenate([group.scores for group in batch.groups])
        metrics = {"rewards/mean": float(scores.mean())}
        self._log.add_step(step, self.consumer.lineage, batch.manifest.gids, metrics)
        return {
            "prompt_ids": [group.prompt_ids.tolist() for group in batch.groups for _ in group.states],
            "completion_ids": [state.response_ids.tolist() for state in states],
            "logprobs": [state.logprobs.tolist() for state in states],
            "env_mask": [mask.tolist() for group in batch.groups for mask in _masks(group)],
            "score": scores.tolist(),
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._publish(kwargs["model"], kwargs["processing_class"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._publish(kwargs["model"], kwargs["processing_class"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """TRL's checkpoint is there: put the position into it, then commit (I6)."""
        folder = Path(args.output_dir)
        file = folder / f"checkpoint-{state.global_step}" / POSITION
        file.with_suffix(".tmp").write_text(self.position.model_dump_json(), encoding="utf-8")
        file.with_suffix(".tmp").replace(file)
        self.consumer.commit(self.position.step, keep=whole_checkpoints(folder)[0])

    def _publish(self, model: Any, tokenizer: Any) -> None:
        def save(folder: Path) -> None:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        pause = self._config.policy.pause_mode
        publish(self.consumer, self._weights, self.position.step, save, pause=pause)


def judged(prompts: Any, completions: Any, score: list[float], **_: Any) -> list[float]:
    """TRL's reward function: the run's judges have said it already."""
    return score


def whole_checkpoints(folder: Path) -> list[int]:
    """Steps of TRL's checkpoints that hold a position, oldest first."""
    return sorted(int(file.parent.name.rpartition("-")[2]) for file in folder.glob(f"checkpoint-*/{POSITION}"))


def train(run: Run, config: TrainingConfig, model_dir: Path, *, take_over: bool = False) -> None:
    """From TRL's newest checkpoint to the last step of the plan."""
    folder = config.run.folder / "trl"
    steps = whole_checkpoints(folder)
    newest = folder / f"checkpoint-{steps[-1]}" if steps else None
    position = Position.model_validate_json((newest / POSITION).read_bytes()) if newest else Position()
    queue = QueueRollouts(run, config, position)
    queue.consumer.open(position=position, take_over=take_over)
    if newest:  # it may have died between its checkpoint and the commit
        queue.consumer.commit(position.step, keep=steps[0])
    groups = {task.prompt_repeat_k for task in config.tasks.values() if task.eval_of is None}
    if len(groups) > 1:
        raise ConfigError(f"TRL knows one num_generations, and the tasks have {sorted(groups)}", hint="prompt_repeat_k")
    (group_size,) = groups
    rollouts = config.plan.batch_size * group_size
    arguments = GRPOConfig(
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
    trainer = GRPOTrainer(
        model=load_model(model_dir),
        processing_class=load_tokenizer(model_dir),
        reward_funcs=judged,
        args=arguments,
        # only counted: which prompts are drawn is the producer's business
        train_dataset=Dataset.from_dict({"prompt": ["from the queue"] * rollouts}),
        rollout_func=queue.rollouts,
        callbacks=[queue],
    )
    trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    queue.consumer.finish()
    queue.consumer.close()


def _masks(group: RolloutGroup) -> list[NDArray[np.uint8]]:
    """uint8[R] of each rollout: 0 where a token is not the model's, or too old."""
    ends = group.lengths.cumsum()
    return [group.mask[end - length : end] for end, length in zip(ends, group.lengths, strict=True)]
