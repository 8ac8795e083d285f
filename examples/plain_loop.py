"""GRPO in a plain torch loop: everything that a trainer must do to lose nothing, in one file.

rolloutmq run configs/demo.toml --set run.name=plain --set
trainer.loop=examples.plain_loop:train

For a trainer of your own, name it in the config: `loop = "my_module:my_function"`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from buffer.errors import ConfigError
from buffer.run.run import Run
from consumer.grpo.evaluation import measure
from consumer.grpo.model_state.learner_state import TrainedModel
from consumer.grpo.models.model_folder import copy_tokenizer, load_model, save_model
from consumer.handle.batch import Batch
from consumer.handle.checkpointed_consumer import CheckpointedConsumer
from consumer.handle.torch_dataset import padded_tensors
from rolloutmq.config.config import Config

STATE = "state.safetensors"

Loss = Callable[[torch.nn.Module, Batch], tuple[torch.Tensor, dict[str, float]]]
"""Return the loss of a batch, and the metrics to log."""


def train(run: Run, config: Config, model_dir: Path, *, take_over: bool = False) -> None:
    """Train from the newest checkpoint to the last step. The process may be killed at any line."""
    fit(run, config, model_dir, load_model(model_dir), batch_loss, take_over)


def fit(
    run: Run,
    config: Config,
    model_dir: Path,
    model: Any,
    batch_loss: Loss,
    take_over: bool,
) -> None:
    """Train any model with any loss, from the newest checkpoint to the last step."""
    check_temperature(config)
    last = run.limits.steps
    # fences an earlier trainer; killed at any line, the next one continues from its checkpoint
    with CheckpointedConsumer(run, config.run.folder, take_over=take_over) as consumer:
        # groups with ids that the model does not have are quarantined
        consumer.vocabulary = model.get_input_embeddings().num_embeddings
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learner.learning_rate)
        parameters = dict(model.named_parameters())
        trained = TrainedModel(parameters, optimizer, torch.device("cpu"))
        if consumer.checkpoint:
            trained.load_state_tensors(load_file(consumer.checkpoint / STATE))

        def save(folder: Path) -> None:
            save_model(model, folder)
            copy_tokenizer(model_dir, folder)

        for batch in consumer.steps(
            save,
            save_state=lambda folder: save_file(trained.state_tensors(), folder / STATE),
            checkpoint_every=config.trainer.checkpoint_every_steps,
            pause=config.policy.pause_mode,
        ):
            loss, metrics = batch_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            metrics["loss/policy"] = loss.item()
            # for the curves, and for `rolloutmq metrics` and its alerts
            consumer.report(batch.step, metrics)
        for name, task in config.tasks.items():
            if task.eval_of and not consumer.stopping:
                groups = consumer.evaluate(name, config.evaluation_size(name))
                consumer.report(last, measure(groups), task=name)


def check_temperature(config: Config) -> None:
    """Raise ConfigError where rollouts are not sampled from the distribution of `grpo_loss`."""
    for name in config.training_tasks:
        if (sampled := config.tasks[name].sample.temperature) != 1:
            raise ConfigError(
                f"task {name} is sampled with temperature {sampled:g}, and this loop computes the "
                "log-probabilities of temperature 1",
                hint="set the task's sample.temperature to 1, or divide the logits by it",
            )


def batch_loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the GRPO loss of a batch of text, and its metrics."""
    rows = padded_tensors(batch)
    output = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])
    # logits of a position predict the next token
    logits = output.logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(2, rows["input_ids"][:, 1:, None]).squeeze(2)
    return grpo_loss(logprobs, rows), {"rewards/mean": float(rows["scores"].mean())}


def grpo_loss(logprobs: torch.Tensor, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the clipped loss against the rollouts' own logprobs, the mean over trained tokens.

    `logprobs`: float32[S, L - 1], of every token but the first of each row.
    """
    scores = rows["scores"]
    group = rows["group"]
    size = torch.bincount(group).float()
    mean = torch.zeros(len(size)).index_add(0, group, scores) / size
    squares = torch.zeros(len(size)).index_add(0, group, (scores - mean[group]).square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    advantage = ((scores - mean[group]) / (std[group] + 1e-6))[:, None]
    mask = rows["loss_mask"][:, 1:]
    # 0 for masked tokens before exp: 0 times an infinite derivative is nan
    ratio = torch.where(mask > 0, logprobs - rows["logprobs"][:, 1:], 0.0).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    # clamp: a batch may have no trained token
    return -(gain * mask).sum() / mask.sum().clamp(min=1)
