"""REINFORCE beside a server, producer and workers that are already there, without a config.

python -m examples.reinforce redis://host:6379/0 RUN MODEL_FOLDER STEPS; the same again after any
crash.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolloutmq import FolderSender, Position, RolloutConsumer, Run, Store, padded_tensors, publish


def train(url: str, name: str, model_dir: str, steps: int) -> None:
    """Train from the checkpoint, if there is one, to the last step."""
    checkpoint = Path("reinforce.safetensors")
    unfinished = Path("unfinished")
    weights = FolderSender(Path("weights"))
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    parameters = dict(model.named_parameters())
    position = Position()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.01)
    if checkpoint.exists():
        with safe_open(checkpoint, "pt") as saved:
            position = Position.model_validate_json(saved.metadata()["position"])
            for key, parameter in parameters.items():
                parameter.data.copy_(saved.get_tensor(key))

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    run = Run.open(Store(url), name)
    consumer = RolloutConsumer(run)
    # a killed trainer counts as alive for some more seconds
    consumer.open(position=position, take_over=True)
    if position.step:
        # the last one may have died before its commit
        consumer.commit(position.step, keep=position.step)
    # first: weights that a dead trainer published later are not in the checkpoint
    publish(consumer, weights, position.step, save, pause="keep")
    for step in range(position.step + 1, steps + 1):
        batch = consumer.take_batch(step, run.limits.mix().shares(step), waiting=print)
        rows = padded_tensors(batch)
        ids = rows["input_ids"]
        logits = model(input_ids=ids, attention_mask=rows["attention_mask"]).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
        advantage = rows["scores"] - rows["scores"].mean()
        mask = rows["loss_mask"][:, 1:]
        loss = -(advantage[:, None] * logprobs * mask).sum() / mask.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        position.add(batch.manifest)
        position.forget(step)  # only this checkpoint will be kept
        save_file(parameters, unfinished, metadata={"position": position.model_dump_json()})
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(checkpoint)  # atomic; only then:
        consumer.commit(step, keep=step)
        publish(consumer, weights, step, save, pause="keep")
    consumer.finish()
    consumer.close()


if __name__ == "__main__":
    url, name, model_dir, steps = sys.argv[1:]
    train(url, name, model_dir, int(steps))
