"""REINFORCE beside a server, producer and workers that are already there, without a config.

python -m examples.reinforce redis://host:6379/0 RUN MODEL_FOLDER; the same again after any crash.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolloutmq import CheckpointedConsumer, Run, Store, padded_tensors


def train(url: str, name: str, model_dir: str) -> None:
    """Train from the checkpoint, if there is one, to the last step."""
    run = Run.open(Store(url), name)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    # a killed trainer counts as alive for some more seconds
    with CheckpointedConsumer(run, Path("reinforce"), take_over=True, keep=1) as consumer:
        model = AutoModelForCausalLM.from_pretrained(consumer.checkpoint or model_dir)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def save(folder: Path) -> None:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        for batch in consumer.steps(save, waiting=print):
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


if __name__ == "__main__":
    train(*sys.argv[1:])
