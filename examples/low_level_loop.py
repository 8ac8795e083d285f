"""A colocated trainer in its single steps (XTuner's `main_colocate_with_train_lowlevel`).

rolloutmq run configs/colocated.toml --set run.name=low-level --set
trainer.loop=examples.low_level_loop:train

Between any two steps of `train_on` is room for code of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from buffer.ledger.position import Position
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from consumer.grpo.evaluation import measure
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.models.model_folder import copy_tokenizer
from consumer.grpo.policy.policy import Policy
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.publication import open_sender, published
from consumer.handle.ranks import ALONE, select_device
from consumer.handle.rollout_consumer import RolloutConsumer
from rolloutmq.config.config import Config

STATE = "state.safetensors"


def train(run: Run, config: Config, model_dir: Path, *, take_over: bool = False) -> None:
    """Train from the newest checkpoint to the last step. The process may be killed at any line."""
    device = select_device(config.trainer.device, ALONE)
    policy = Policy(model_dir, config.learner, device=device, seed=config.run.seed)
    controller = TrainController.of(config, policy, model_dir)
    sender = open_sender(config, run)
    checkpoints = CheckpointFolder(config.run.folder / "checkpoints")
    steps = checkpoints.steps()
    position = checkpoints.read(steps[-1]) if steps else Position()
    consumer = RolloutConsumer(run)
    consumer.vocabulary = policy.vocabulary
    consumer.open(position=position, take_over=take_over)
    if position.step:
        controller.load_state_tensors(load_file(checkpoints.path(position.step) / STATE))
        consumer.commit(position.step, keep=steps[0])

    def save(folder: Path) -> None:
        policy.save_weights(folder, to_publish=True)
        copy_tokenizer(model_dir, folder)

    def save_checkpoint(folder: Path) -> None:
        policy.save_weights(folder)
        copy_tokenizer(model_dir, folder)
        save_file(controller.state_tensors(), folder / STATE)

    pause = config.policy.pause_mode
    with published(consumer, sender, position.step, save, pause=pause):
        controller.sleep()  # the workers get the device when the pause ends
    for step in range(position.step + 1, config.plan.steps + 1):
        # the producer has begun to fill the batch when the weights before were published
        batch = consumer.take_batch(step, run.limits.mix().shares(step))
        with consumer.paused(pause):  # interrupted groups return, and engines sleep
            controller.wake()
            metrics = train_on(controller, batch.groups)
            position.add(batch.manifest)
            consumer.report(step, metrics)
            if step % config.trainer.checkpoint_every_steps == 0 or step == config.plan.steps:
                position.forget(checkpoints.oldest_with(step, 2))
                checkpoints.write(position, save_checkpoint)
                consumer.commit(step, keep=checkpoints.prune(2))
            with published(consumer, sender, step, save, pause=None):
                controller.sleep()
    evaluate(consumer, config)
    consumer.finish()
    consumer.close()


def train_on(controller: TrainController, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Do what `controller.fit(groups)` does, step by step, without its filter of groups."""
    batch = controller.pack_pad_dispatch(groups)
    batch = controller.compute_old_logprobs(batch)
    batch = controller.compute_ref_logprobs(batch)
    batch = controller.compute_values(batch)
    batch = controller.compute_advantages(batch)
    metrics = controller.train(batch)
    scores = [float(group.scores.mean()) for group in groups]
    return metrics | {"rewards/mean": sum(scores) / len(scores)}


def evaluate(consumer: RolloutConsumer, config: Config) -> None:
    """Evaluate the newest weights on every evaluation task."""
    for name in (name for name, task in config.tasks.items() if task.eval_of):
        metrics = measure(consumer.evaluate(name, config.evaluation_size(name)))
        consumer.report(config.plan.steps, metrics, task=name)
