"""GRPO in a plain torch loop: everything a trainer has to do to lose nothing, in seventy lines.

rolloutmq run configs/demo.toml --set run.name=plain --set trainer.loop=consumer.examples.plain_loop:train

In place of this file, put one of yours: `loop = "my_module:my_function"`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from buffer import Run
from buffer.recovery.position import Position
from buffer.weights.shared_folder import FolderSender
from consumer.batch import Batch
from consumer.batch_dataset import BatchDataset, padded_tensors
from consumer.checkpoint import CheckpointFolder
from consumer.config import TrainingConfig
from consumer.evaluator import Evaluator
from consumer.learner_state import capture, restore
from consumer.model_folder import copy_tokenizer, load_model, save_model
from consumer.publication import publish
from consumer.rollout_consumer import RolloutConsumer
from consumer.step_log import StepWriter

Loss = Callable[[torch.nn.Module, Batch], tuple[torch.Tensor, dict[str, float]]]
"""What to minimize of a batch, and what to log of it."""


def train(run: Run, config: TrainingConfig, model_dir: Path, *, take_over: bool = False) -> None:
    """From the newest checkpoint to the last step of the plan. It may be killed at any line."""
    fit(run, config, model_dir, load_model(model_dir), batch_loss, take_over)


def fit(run: Run, config: TrainingConfig, model_dir: Path, model: Any, batch_loss: Loss, take_over: bool) -> None:
    """The same for any model and loss."""
    folder, last = config.run.folder, config.plan.steps
    checkpoints, weights = CheckpointFolder(folder / "checkpoints"), FolderSender(folder / "weights")
    log, consumer = StepWriter(folder), RolloutConsumer(run)
    position = checkpoints.read(checkpoints.steps()[-1]) if checkpoints.steps() else Position()
    consumer.open(position=position, take_over=take_over)  # fences a trainer that came before; a new lineage begins

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learner.learning_rate)
    parameters, device = dict(model.named_parameters()), torch.device("cpu")
    if position.step:
        restore(load_file(checkpoints.path(position.step) / "state.safetensors"), parameters, optimizer, device)
        consumer.commit(position.step, keep=checkpoints.steps()[0])  # it may have died just before

    def save(folder: Path) -> None:
        save_model(model, folder)
        copy_tokenizer(model_dir, folder)

    def save_checkpoint(folder: Path) -> None:
        save(folder)
        save_file(capture(parameters, optimizer, position.step, device), folder / "state.safetensors")

    # those of this lineage: what the dead trainer published later is not in the checkpoint
    publish(consumer, weights, position.step, save, pause=config.policy.pause_mode)
    for batch in BatchDataset(consumer, run.limits.mix().shares, first=position.step + 1, last=last):
        loss, metrics = batch_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        position.add(batch.manifest)  # AccountError if one of its groups was trained before
        log.add_step(batch.step, consumer.lineage, batch.manifest.gids, {"loss": loss.item(), **metrics})
        if batch.step % config.trainer.checkpoint_every_steps == 0 or batch.step == last:
            position.forget(checkpoints.oldest_with(batch.step, 2))
            checkpoints.write(position, save_checkpoint)  # whole or not there; only then:
            consumer.commit(batch.step, keep=checkpoints.prune(2))
        publish(consumer, weights, batch.step, save, pause=config.policy.pause_mode)
    for name in (name for name, task in config.tasks.items() if task.eval_of):
        log.add_evaluation(last, name, Evaluator().evaluate(consumer.evaluate(name, config.evaluation_size(name))))
    consumer.finish()
    consumer.close()


def batch_loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    rows = padded_tensors(batch)
    logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(2, rows["input_ids"][:, 1:, None]).squeeze(2)
    return grpo_loss(logprobs, rows), {"rewards/mean": float(rows["scores"].mean())}


def grpo_loss(logprobs: torch.Tensor, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """The clipped loss of float32[S, L - 1] against the rollout's own logprobs, mean over tokens."""
    scores, group = rows["scores"], rows["group"]
    size = torch.bincount(group).float()
    mean = torch.zeros(len(size)).index_add(0, group, scores) / size
    std = (torch.zeros(len(size)).index_add(0, group, (scores - mean[group]).square()) / (size - 1).clamp(min=1)).sqrt()
    advantage = ((scores - mean[group]) / (std[group] + 1e-6))[:, None]
    ratio, mask = (logprobs - rows["logprobs"][:, 1:]).exp(), rows["loss_mask"][:, 1:]
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return -(gain * mask).sum() / mask.sum().clamp(min=1)  # a batch may have nothing to train
