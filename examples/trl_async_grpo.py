"""TRL's `AsyncGRPOTrainer` on a run: its optimizer, loss and logging, with the workers' rollouts.

rolloutmq run configs/my_run.toml --set trainer.loop=examples.trl_async_grpo:train

TRL 1.16 has two seams. Its rollout worker is here `QueueRollouts`, which takes the batches of the
run; its weight transfer is `PublishedWeights`, which publishes what TRL would send to its own vLLM
server. A checkpoint of TRL's also contains the position of the run, and only then are its steps
committed: killed at any line, the same command continues, and later steps are delivered again.

TRL reads one micro-batch ahead, so a rollout is at least one step old when it is trained on. Its
attention needs a CUDA GPU.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from buffer.errors import ConfigError
from buffer.ledger.position import Position
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from consumer.grpo.learner.advantages import ESTIMATORS
from consumer.grpo.learner.group_rewards import GroupRewards
from consumer.grpo.models.model_folder import load_tokenizer
from consumer.handle.batch import Batch
from consumer.handle.publication import open_sender, publish
from consumer.handle.rollout_consumer import RolloutConsumer
from examples.plain_loop import check_temperature
from rolloutmq.config.config import Config

POSITION = "rolloutmq.json"
"""Name of the position's file in TRL's checkpoint folders; a folder without it is incomplete."""


class QueueRollouts:
    """Represents TRL's rollout worker and its queue: `get` returns the next rollout of the run."""

    def __init__(self, consumer: RolloutConsumer, run: Run, config: Config) -> None:
        self.rollout_buffer = self
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.taken: deque[Batch] = deque()
        """batches that were taken and not yet trained on, oldest first"""
        self._consumer = consumer
        self._run = run
        self._config = config
        self._next = self._first = 0
        self._samples: deque[RolloutSample] = deque()

    def open(self, position: Position) -> None:
        """Continue after the last step of `position`."""
        self._first = position.step
        self._next = position.step + 1

    def get(self, timeout: float) -> RolloutSample:
        """Return the next rollout; raise `queue.Empty` where its batch takes longer than that."""
        if not self._samples:
            self._samples.extend(self._read(timeout))
        return self._samples.popleft()

    def qsize(self) -> int:
        """Return the number of rollouts that can be had without waiting."""
        return len(self._samples)

    def _read(self, timeout_s: float) -> Iterable[RolloutSample]:
        step = self._next
        if step > self._run.limits.steps:
            # read ahead of the end, and never trained on
            return self._rollouts(self.taken[-1])
        counts = self._run.limits.mix().shares(step)
        try:
            batch = self._consumer.take_batch(step, counts, deadline_s=timeout_s)
        except TimeoutError:
            raise queue.Empty from None
        self._check_size(batch)
        self._next += 1
        self.taken.append(batch)
        return self._rollouts(batch)

    def _check_size(self, batch: Batch) -> None:
        expected = batch_rollouts(self._config)
        found = sum(len(group) for group in batch.groups)
        if found != expected:
            raise ConfigError(
                f"step {batch.step} has {found} rollouts, and TRL trains on {expected} at a time",
                hint="an agent whose rollouts have several segments needs the reference trainer",
            )

    def _rollouts(self, batch: Batch) -> Iterator[RolloutSample]:
        groups = batch.groups
        advantages = ESTIMATORS["grpo"]([GroupRewards.of(group) for group in groups])
        each = iter(np.concatenate(advantages).tolist())
        for number, group in enumerate(groups, batch.step * len(groups)):
            yield from self._members(group, number, each)

    def _members(
        self, group: RolloutGroup, number: int, advantages: Iterator[float]
    ) -> Iterator[RolloutSample]:
        prompt = group.prompt_ids
        nothing = np.zeros(len(prompt))
        # TRL counts versions from the first that it publishes itself
        oldest = group.oldest()
        version = (oldest.version if oldest else self._first) - self._first + 1
        parts = group.lengths.cumsum()[:-1]
        columns = (
            np.split(column, parts) for column in (group.response_ids, group.mask, group.logprobs)
        )
        for ids, mask, logprobs, score in zip(*columns, group.scores.tolist(), strict=True):
            yield RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.concatenate([prompt, ids]),
                completion_mask=np.concatenate([nothing, mask]),
                old_log_probs=np.concatenate([nothing, logprobs]),
                advantage=next(advantages),
                model_version=version,
                group_id=number,
                metrics={"reward": score},
            )

    def start(self) -> None:
        """Do nothing: the workers of the run are at work."""

    def stop(self) -> None:
        """Do nothing: the run goes on without this trainer."""

    def update_model_version(self, model_version: int) -> None:
        """Do nothing: workers learn the version from the run."""

    def check_health(self, stale_after_s: float) -> None:
        """Do nothing: `take_batch` raises where no batch can come any more."""


class PublishedWeights:
    """Represents TRL's weight transfer: a version of the run's weights for each that it sends."""

    def __init__(
        self, consumer: RolloutConsumer, run: Run, config: Config, position: Position
    ) -> None:
        self.trainer: AsyncGRPOTrainer = None
        """assigned once it is made: it needs this object first"""
        self._consumer = consumer
        self._config = config
        self._position = position
        self._sender = open_sender(config, run)
        self._published: int | None = None

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Publish the tensors, whole and one after the other, as the weights of the last step."""
        step = self._position.step
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in iterator}

        def save(folder: Path) -> None:
            model = self.trainer.accelerator.unwrap_model(self.trainer.model)
            model.save_pretrained(folder, state_dict=tensors)
            self.trainer.processing_class.save_pretrained(folder)

        publish(self._consumer, self._sender, step, save, pause=self._config.policy.pause_mode)
        self._published = step

    def send_last(self) -> None:
        """Publish the weights after the last step, where the interval has left them out."""
        if self._published != self._position.step:
            parameters = self.trainer.model.named_parameters()
            self.send_weights((name, _whole(tensor.detach())) for name, tensor in parameters)

    def init_weight_transfer(self) -> None:
        """Do nothing: the run's transport was opened with this object."""

    def pause(self) -> None:
        """Do nothing: `send_weights` pauses the workers while they switch."""

    def resume(self) -> None:
        """Do nothing: see `pause`."""

    def destroy(self) -> None:
        """Do nothing: `close` comes after the last weights."""

    def close(self) -> None:
        """Close the transport."""
        self._sender.close()


class Commits(TrainerCallback):  # type: ignore[misc]
    """Keeps the position of the run with TRL's checkpoints, and commits them."""

    def __init__(
        self, consumer: RolloutConsumer, position: Position, rollouts: QueueRollouts
    ) -> None:
        self._consumer = consumer
        self._position = position
        self._rollouts = rollouts

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the batch of the step. TRL publishes the weights after this."""
        batch = self._rollouts.taken[0]
        self._position.add(batch.manifest)
        scores = np.concatenate([group.scores for group in batch.groups])
        self._consumer.report(batch.step, {"rewards/mean": float(scores.mean())})
        if len(self._rollouts.taken) > 1:
            self._rollouts.taken.popleft()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the position to a checkpoint that TRL has written, then commit it (I6)."""
        folder = Path(args.output_dir)
        file = folder / f"checkpoint-{state.global_step}" / POSITION
        file.with_suffix(".tmp").write_text(self._position.model_dump_json(), encoding="utf-8")
        file.with_suffix(".tmp").replace(file)
        self._consumer.commit(self._position.step, keep=complete_checkpoints(folder)[0])


def train(run: Run, config: Config, model_dir: Path, *, take_over: bool = False) -> None:
    """Train from TRL's newest checkpoint to the last step of the plan."""
    check_temperature(config)
    _check_staleness(run, config)
    _check_group_sizes(run, config)
    folder = config.run.folder / "trl"
    steps = complete_checkpoints(folder)
    newest = folder / f"checkpoint-{steps[-1]}" if steps else None
    position = Position()
    if newest:
        position = Position.model_validate_json((newest / POSITION).read_bytes())
    consumer = RolloutConsumer(run)
    consumer.open(position=position, take_over=take_over)
    if newest:
        # the last trainer may have died between its checkpoint and the commit
        consumer.commit(position.step, keep=steps[0])
    rollouts = QueueRollouts(consumer, run, config)
    rollouts.open(position)
    weights = PublishedWeights(consumer, run, config, position)
    weights.trainer = AsyncGRPOTrainer(
        model=str(model_dir),
        args=_arguments(config, folder, run.limits.steps),
        processing_class=load_tokenizer(model_dir),
        # not read: the producer of the run draws the prompts
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        callbacks=[Commits(consumer, position, rollouts)],
        rollout_worker=rollouts,
        weight_transfer=weights,
    )
    consumer.vocabulary = weights.trainer.model.get_input_embeddings().num_embeddings
    weights.trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    weights.send_last()
    weights.close()
    consumer.finish()
    consumer.close()


def complete_checkpoints(folder: Path) -> list[int]:
    """Return the steps of TRL's checkpoints that contain a position, oldest first."""
    files = folder.glob(f"checkpoint-*/{POSITION}")
    return sorted(int(file.parent.name.rpartition("-")[2]) for file in files)


def batch_rollouts(config: Config) -> int:
    """Return the rollouts of a batch. Raises ConfigError where the tasks' groups differ in size."""
    sizes = {config.tasks[name].prompt_repeat_k for name in config.training_tasks}
    if len(sizes) > 1:
        raise ConfigError(
            f"TRL trains on the same number of rollouts in every step, and prompt_repeat_k is "
            f"{sorted(sizes)}",
            hint="set the same prompt_repeat_k for all training tasks",
        )
    return config.plan.batch_size * sizes.pop()


def _check_group_sizes(run: Run, config: Config) -> None:
    """Refuse a prompt_repeat_k that was edited while groups of another size are to be trained."""
    for task in config.training_tasks:
        size = config.tasks[task].prompt_repeat_k
        others = {"task": task, "samples": {"$ne": size}, "stage": {"$not_in": ["dead"]}}
        if found := next(run.groups.find(others, limit=1), None):
            raise ConfigError(
                f"tasks.{task}.prompt_repeat_k is {size}, and group {found.gid} of the run has "
                f"{found.samples} rollouts: TRL trains on the same number in every step",
                hint=f"set prompt_repeat_k = {found.samples} again, or start another run; the "
                "reference trainer accepts groups of several sizes",
            )


def _check_staleness(run: Run, config: Config) -> None:
    """Refuse limits that TRL cannot keep, which reads a micro-batch before the next update."""
    interval = config.policy.sync_weights_interval
    for task in run.limits.training_tasks:
        if (oldest := run.limits.horizon(task) - 1) < interval:
            raise ConfigError(
                f"task {task} has max_staleness = {oldest}, and TRL reads its rollouts before the "
                f"weights of the step before are published, every {interval} steps",
                hint=f"set [policy] max_staleness to at least {interval}",
            )


def _arguments(config: Config, folder: Path, steps: int) -> AsyncGRPOConfig:
    rollouts = batch_rollouts(config)
    micro_batch = _micro_batch(config, rollouts)
    on_gpu = torch.cuda.is_available()
    return AsyncGRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rollouts // micro_batch,
        # a fixed number of rollouts, so that an optimizer step is a step of the run
        token_budget=0,
        # the queue has refused what is older than the run allows
        max_staleness=steps,
        weight_sync_steps=config.policy.sync_weights_interval,
        learning_rate=config.learner.learning_rate,
        save_steps=config.trainer.checkpoint_every_steps,
        save_total_limit=2,
        logging_steps=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to=[],
        disable_tqdm=True,
        seed=config.run.seed,
    )


def _micro_batch(config: Config, rollouts: int) -> int:
    """Return the largest divisor of `rollouts` whose responses fit the token budget."""
    longest = max(config.tasks[name].sample.max_tokens for name in config.training_tasks)
    fitting = max(1, config.learner.token_budget // longest)
    return max(size for size in range(1, rollouts + 1) if rollouts % size == 0 and size <= fitting)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
