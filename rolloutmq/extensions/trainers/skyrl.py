"""SkyRL's generator, whose groups come from a run: its trainer trains what workers here sample.

`RayPPOTrainer` draws a batch of prompts, and asks a generator for their rollouts. This one leaves
the prompts to the producer of the run, which draws them ahead, so that sampling and training
overlap, and returns the batch of the step: as many groups of as many rollouts as were asked for.
The same object is a callback of the trainer: it records each step, publishes the weights, and
commits what is in a checkpoint. docs/pages/trainers/skyrl.md has the program that starts it.

the trainer dies                             the next one
  before SkyRL's checkpoint is complete      continues from the one before, with the same batches
  after that, before `on_save`               finds the step's position beside the checkpoints
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback

from buffer.errors import ConfigError
from buffer.ledger.position import Position
from buffer.redis.whole_file import replace_file
from buffer.run.run import Run
from buffer.weights.transport import WeightsSender
from consumer.handle.async_consumer import AsyncRolloutConsumer
from consumer.handle.batch import Batch
from consumer.handle.publication import publish
from consumer.handle.rollout_consumer import PauseMode

POSITIONS = "rolloutmq"
"""Folder beside SkyRL's checkpoints with the position of each step."""


class RunGenerator(GeneratorInterface, TrainingCallback):  # type: ignore[misc]
    """A generator and a callback of one trainer.

    `evaluation` generates for SkyRL's evaluations; without it, use those of the run.
    """

    def __init__(
        self,
        run: Run,
        sender: WeightsSender,
        *,
        pause: PauseMode = "keep",
        publish_every: int = 1,
        evaluation: GeneratorInterface | None = None,
    ) -> None:
        self._run = run
        self._sender = sender
        self._pause: PauseMode = pause
        self._publish_every = publish_every
        self._evaluation = evaluation
        self._consumer = AsyncRolloutConsumer(run)
        self._position = Position()
        self._batch: Batch | None = None

    # -- the generator -------------------------------------------------------------------------

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return the batch of the step in place of rollouts of these prompts."""
        facts = input_batch["batch_metadata"]
        if facts.training_phase == "eval":
            if self._evaluation is None:
                raise ConfigError(
                    "this generator has no rollouts for SkyRL's evaluation",
                    hint="set trainer.eval_interval=-1 and evaluate a task of the run, or pass "
                    "evaluation=SkyRLGymGenerator(…)",
                )
            return await self._evaluation.generate(input_batch)
        counts = self._run.limits.mix().shares(facts.global_step)
        self._batch = await self._consumer.take_batch(facts.global_step, counts)
        prompts = [each.instance_id for each in input_batch["trajectory_ids"]]
        expected = [prompts.count(uid) for uid in dict.fromkeys(prompts)]
        found = [len(group) for group in self._batch.groups]
        if found != expected:  # the trainer would compare rollouts across groups
            raise ConfigError(
                f"step {self._batch.step} has groups of {found} rollouts, SkyRL expects {expected}",
                hint="let [plan] batch_size be trainer.train_batch_size, and prompt_repeat_k "
                "generator.n_samples_per_prompt",
            )
        return output_of(self._batch)

    # -- the callback --------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Become the trainer of the run at the step of SkyRL's checkpoint; publish its weights."""
        sampling = trainer.cfg.trainer.algorithm.dynamic_sampling
        if sampling.type is not None:
            raise ConfigError(
                f"dynamic_sampling.type = {sampling.type} would ask for a step's batch twice",
                hint="set it to null; [strategy] is_valid_sample_fn drops groups before the batch",
            )
        step = callback_input.global_step
        if step:
            file = self._file(trainer, step)
            if not file.exists():
                raise ConfigError(
                    f"SkyRL resumes at step {step}, but {file} does not exist",
                    hint="point trainer.ckpt_path at an empty folder to start anew",
                )
            self._position = Position.model_validate_json(file.read_bytes())
        consumer = self._consumer.blocking
        consumer.open(position=self._position, take_over=True)
        if step:
            consumer.commit(step, keep=self._oldest_kept(trainer))
        self._publish(trainer, step)

    def on_step_end(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Record the batch, before SkyRL writes a checkpoint; publish the new weights."""
        batch = self._batch
        assert batch is not None
        self._position.add(batch.manifest)
        self._position.forget(self._oldest_kept(trainer))
        file = self._file(trainer, batch.step)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, self._position.model_dump_json().encode())
        metrics = {"rewards/mean": float(batch.table.scores.mean())}
        self._consumer.blocking.report(batch.step, metrics)
        if batch.step % self._publish_every == 0:
            self._publish(trainer, batch.step)

    def on_save(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Commit the steps of a complete checkpoint."""
        keep = self._oldest_kept(trainer)
        self._consumer.blocking.commit(callback_input.global_step, keep=keep)
        for file in self._file(trainer, 0).parent.glob("step-*.json"):
            if int(file.stem.removeprefix("step-")) < keep:
                file.unlink()

    def on_train_end(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        self._consumer.blocking.finish()
        self._consumer.blocking.close()
        self._sender.close()

    def _publish(self, trainer: Any, step: int) -> None:
        def save(folder: Path) -> None:
            trainer.dispatch.save_hf_model("policy", str(folder), trainer.tokenizer)

        publish(self._consumer.blocking, self._sender, step, save, pause=self._pause)

    def _file(self, trainer: Any, step: int) -> Path:
        return Path(trainer.cfg.trainer.ckpt_path) / POSITIONS / f"step-{step}.json"

    def _oldest_kept(self, trainer: Any) -> int:
        """Return the step of the oldest checkpoint from which a trainer can continue; 0: none."""
        names = (path.name for path in Path(trainer.cfg.trainer.ckpt_path).glob("global_step_*"))
        steps = sorted(int(name[12:]) for name in names if re.fullmatch(r"global_step_\d+", name))
        return steps[-2:][0] if steps else 0  # a trainer continues from the last two


def output_of(batch: Batch) -> GeneratorOutput:
    """Return a batch as SkyRL's lists, the rollouts of a group one after the other."""
    rows = [row for group in batch.groups for row in _rows(group)]
    ids, masks, logprobs = ([row[n] for row in rows] for n in range(3))
    ages = [batch.step - 1 - oldest.version for each in batch.groups if (oldest := each.oldest())]
    metrics = {"rolloutmq/waited_s": batch.waited_s}
    if ages:
        metrics |= {"rolloutmq/staleness_mean": float(np.mean(ages))}
        metrics |= {"rolloutmq/staleness_max": float(max(ages))}
    return {
        "prompt_token_ids": [
            group.prompt_ids.tolist() for group in batch.groups for _ in range(len(group))
        ],
        "response_ids": ids,
        "rewards": batch.table.scores.tolist(),
        "loss_masks": masks,
        "stop_reasons": [row[3] for row in rows],
        "rollout_logprobs": logprobs,
        "rollout_metrics": metrics,
    }


def _rows(group: Any) -> list[tuple[list[int], list[int], list[float], str]]:
    """Return ids, mask, logprobs and stop reason of each rollout.

    SkyRL puts a reward on the last token: an empty response becomes one token without a loss.
    """
    ends = group.lengths.cumsum()[:-1]
    columns = (np.split(each, ends) for each in (group.response_ids, group.mask, group.logprobs))
    reasons = [state.finish_reason or "stop" for state in group.states]
    return [
        (ids.tolist(), mask.tolist(), logprobs.tolist(), reason)
        if len(ids)
        else (group.prompt_ids[-1:].tolist(), [0], [0.0], reason)
        for ids, mask, logprobs, reason in zip(*columns, reasons, strict=True)
    ]
