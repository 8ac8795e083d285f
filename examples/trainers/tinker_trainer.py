"""Train and sample at Tinker, with the queue, judges and agents of a run: no GPU of your own.

    [trainer]
    loop = "examples.trainers.tinker_trainer:train"
    [engine]
    kind = "python"
    factory = "examples.trainers.tinker_engine:TinkerEngine"
    options = { base_model = "Qwen/Qwen3-8B", rank = 32, loss = "importance_sampling" }

docs/pages/trainers/tinker.md describes the rest. Weights stay at the service: a version of the run
is a file that names the weights of a sampler there, so workers switch in milliseconds.

the trainer dies                        the next one
  before its checkpoint is in place     resumes from the state before, and gets the same batches
  after that, before the commit         commits, and publishes the weights of that state
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tinker
from numpy.typing import NDArray

from buffer.errors import ConfigError
from buffer.ledger.position import Position
from buffer.run.run import Run
from buffer.weights.checksums import write_tensors
from buffer.wire.group import RolloutGroup
from consumer.grpo.learner.advantages import estimate, load_estimator, per_token
from consumer.grpo.learner.group_rewards import GroupRewards
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.publication import open_sender, publish
from consumer.handle.rollout_consumer import RolloutConsumer
from examples.trainers.tinker_engine import SAMPLER, base_model
from rolloutmq.config.config import Config

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

STATE = "tinker.json"
"""File of a checkpoint that names the weights and the optimizer at the service."""

SAMPLER_TTL_S = 7 * 24 * 3600  # the service deletes a sampler's weights after this time


def train(run: Run, config: Config, model_dir: Path, *, take_over: bool = False) -> None:
    """Train from the newest checkpoint to the last step. The process may be killed at any line."""
    _check_temperature(config)
    model = base_model(config.engine)
    options: dict[str, Any] = getattr(config.engine, "options", {})
    checkpoints = CheckpointFolder(config.run.folder / "checkpoints")
    steps = checkpoints.steps()
    position = checkpoints.read(steps[-1]) if steps else Position()
    consumer = RolloutConsumer(run)
    consumer.open(position=position, take_over=take_over)
    sender = open_sender(config, run)
    adam = tinker.AdamParams(
        learning_rate=config.learner.learning_rate,
        beta1=config.learner.betas[0],
        beta2=config.learner.betas[1],
        weight_decay=config.learner.weight_decay,
        grad_clip_norm=config.learner.max_grad_norm,
    )
    with tinker.ServiceClient() as service:
        if steps:
            saved = orjson.loads((checkpoints.path(steps[-1]) / STATE).read_bytes())
            opened = service.create_training_client_from_state_with_optimizer(saved["state"])
            consumer.commit(position.step, keep=steps[0])  # the dead trainer may not have
        else:
            rank = options.get("rank", 32)
            opened = service.create_lora_training_client(model, rank, seed=config.run.seed)
        client = opened.result()

        def save_sampler(folder: Path) -> None:
            name = f"step-{position.step:06d}"
            saved = client.save_weights_for_sampler(name, SAMPLER_TTL_S).result()
            write_tensors(folder / SAMPLER, {}, {"path": saved.path})

        def save_state(folder: Path) -> None:
            saved = client.save_state(f"step-{position.step:06d}").result()
            (folder / STATE).write_bytes(orjson.dumps({"state": saved.path}))

        publish(consumer, sender, position.step, save_sampler, pause=config.policy.pause_mode)
        for step in range(position.step + 1, config.plan.steps + 1):
            batch = consumer.take_batch(step, run.limits.mix().shares(step))
            metrics = {"rewards/mean": float(batch.table.scores.mean())}
            if data := list(datums(batch.groups, config.trainer.advantages)):
                loss = client.forward_backward(data, options.get("loss", "importance_sampling"))
                update = client.optim_step(adam)
                metrics |= measures(data, loss.result()) | named(update.result().metrics or {})
            consumer.report(step, metrics)
            position.add(batch.manifest)
            if step % config.trainer.checkpoint_every_steps == 0 or step == config.plan.steps:
                position.forget(checkpoints.oldest_with(step, config.trainer.keep_checkpoints))
                checkpoints.write(position, save_state)
                kept = checkpoints.prune(config.trainer.keep_checkpoints)
                consumer.commit(step, keep=kept)
            publish(consumer, sender, step, save_sampler, pause=config.policy.pause_mode)
    sender.close()
    consumer.finish()
    consumer.close()


def _check_temperature(config: Config) -> None:
    """Raise ConfigError where the service would train another distribution than it samples."""
    for name in config.training_tasks:
        if (sampled := config.tasks[name].sample.temperature) != 1:
            raise ConfigError(
                f"task {name} is sampled with temperature {sampled:g}; Tinker trains with 1",
                hint=f"set [tasks.{name}.sample] temperature to 1",
            )


def datums(groups: Sequence[RolloutGroup], advantages: str) -> Iterator[tinker.Datum]:
    """Yield the rollouts that have advantages; the service's sum is then a mean over tokens."""
    rewards = [GroupRewards.of(group) for group in groups]
    found = estimate(advantages, load_estimator(advantages), rewards)
    tokens = np.float32(sum(int(group.mask.sum()) for group in groups) or 1)
    for group, values in zip(groups, found, strict=True):
        weights = per_token(values, group.lengths) * group.mask / tokens
        for ids, logprobs, weight in _split(group, weights):
            if weight.any():
                yield _datum(group.prompt_ids, ids, logprobs, weight)


def _split(group: RolloutGroup, weights: Floats) -> Iterator[tuple[Ints, Floats, Floats]]:
    """Yield the token ids, logprobs and weights of each rollout."""
    ends = group.lengths.cumsum()[:-1]
    columns = (group.response_ids, group.logprobs, weights)
    return zip(*(np.split(column, ends) for column in columns), strict=True)


def _datum(prompt: Ints, response: Ints, logprobs: Floats, advantages: Floats) -> tinker.Datum:
    """Return a rollout whose n tokens are n - 1 inputs and n - 1 targets."""
    ids = np.concatenate([prompt, response])
    nothing = np.zeros(len(prompt) - 1)
    columns = {
        "target_tokens": ids[1:].astype("<i8"),
        "logprobs": np.concatenate([nothing, logprobs]).astype("<f4"),
        "advantages": np.concatenate([nothing, advantages]).astype("<f4"),
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={name: tinker.TensorData.from_numpy(each) for name, each in columns.items()},
    )


def measures(data: Sequence[tinker.Datum], output: Any) -> dict[str, float]:
    """Return the service's metrics, and the distance between its logprobs and the workers'."""
    far = []
    for datum, made in zip(data, output.loss_fn_outputs, strict=True):
        is_trained = datum.loss_fn_inputs["advantages"].to_numpy() != 0
        sampled = datum.loss_fn_inputs["logprobs"].to_numpy()
        far.append(np.abs(made["logprobs"].to_numpy() - sampled)[is_trained])
    found = {"mismatch/abs_logprob": float(np.concatenate(far).mean())}
    return found | named(output.metrics)


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the service's metrics under names of their own."""
    return {f"tinker/{name}": value for name, value in metrics.items()}
