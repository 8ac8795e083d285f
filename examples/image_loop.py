"""GRPO on prompts with images: the plain loop with a vision-language model.

[trainer] loop = "examples.image_loop:train"; needs `pip install '.[images]'`.

`group.multimodal` lists the images of a group's prompt, which are files in the run's folder.
The prompt's ids already contain the tokens of each image, as many as the model's processor creates
for the same file.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from consumer.handle.batch import Batch
from consumer.handle.torch_dataset import padded_tensors
from examples.plain_loop import fit, grpo_loss
from producer_workers.build import image_folder
from producer_workers.images import ImageFolder
from rolloutmq.config.config import Config


def train(run: Run, config: Config, model_dir: Path, *, take_over: bool = False) -> None:
    """Train from the newest checkpoint to the last step."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(model_dir)
    loss = partial(image_loss, processor=processor, folder=image_folder(config))
    fit(run, config, model_dir, model, loss, take_over)


def image_loss(
    model: Any, batch: Batch, *, processor: Any, folder: ImageFolder
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the GRPO loss of a batch of prompts with images, and its metrics."""
    rows = padded_tensors(batch)
    logprobs = image_logprobs(model, batch, rows, processor, folder)
    sampled = rows["loss_mask"][:, 1:] > 0
    difference = (logprobs - rows["logprobs"][:, 1:])[sampled].abs()
    metrics = {
        "rewards/mean": float(rows["scores"].mean()),
        "mismatch/max_logprob": difference.max().item() if sampled.any() else 0.0,
    }
    return grpo_loss(logprobs, rows), metrics


def image_logprobs(
    model: Any, batch: Batch, rows: dict[str, torch.Tensor], processor: Any, folder: ImageFolder
) -> torch.Tensor:
    """Return float32[S, L - 1], the log-probability of every token but the first of each row.

    A response that contains an image token is masked in `rows`: a forward pass would expect one
    more image.
    """
    width = rows["input_ids"].shape[1] - 1
    takes_types = "mm_token_type_ids" in inspect.signature(model.forward).parameters
    lines: list[torch.Tensor] = []
    for group in batch.groups:
        pixels = read_pixels(group, processor, folder)
        for _ in range(len(group)):
            row = len(lines)
            length = int(rows["attention_mask"][row].sum())
            ids = rows["input_ids"][row : row + 1, :length]
            is_image = ids == processor.image_token_id
            if is_image[:, len(group.prompt_ids) :].any():
                rows["loss_mask"][row] = 0
                lines.append(torch.zeros(width))
                continue
            types = {"mm_token_type_ids": is_image.int()} if takes_types else {}
            logits = model(input_ids=ids, **pixels, **types).logits[0, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1)
            lines.append(pad(logprobs, (0, width - len(logprobs))))
    return torch.stack(lines)


def read_pixels(
    group: RolloutGroup, processor: Any, folder: ImageFolder
) -> dict[str, torch.Tensor]:
    """Return the model's inputs for the images of a group's prompt; empty where it has none."""
    images = [folder.read(ref).pixels for ref in group.multimodal]
    return dict(processor.image_processor(images=images, return_tensors="pt")) if images else {}
