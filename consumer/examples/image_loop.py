"""GRPO on prompts that show images: the plain loop, with a vision-language model and the pixels of each prompt.

[trainer] loop = "consumer.examples.image_loop:train"; needs `pip install 'rolloutmq[images]'`.

A group says which images its prompt shows (`group.multimodal`), and the run's folder has their files. The prompt's ids
have the tokens of each image already, as many as the model's processor makes of the same file.
"""

from __future__ import annotations

import inspect
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn.functional import pad

from buffer import RolloutGroup, Run
from buffer.errors import ConfigError
from consumer.batch import Batch
from consumer.batch_dataset import padded_tensors
from consumer.config import TrainingConfig
from consumer.examples.plain_loop import fit, grpo_loss

MOST_BYTES = 100 << 20
"""Of a file; larger ones are none of this run's images."""


def train(run: Run, config: TrainingConfig, model_dir: Path, *, take_over: bool = False) -> None:
    """From the newest checkpoint to the last step of the plan."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    if run.media is None:
        raise ConfigError("the run has no folder for images", hint="set media in [run]")
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(model_dir)
    fit(run, config, model_dir, model, partial(image_loss, processor=processor, run=run), take_over)


def image_loss(model: Any, batch: Batch, *, processor: Any, run: Run) -> tuple[torch.Tensor, dict[str, float]]:
    rows = padded_tensors(batch)
    logprobs = image_logprobs(model, batch, rows, processor, run)
    sampled = rows["loss_mask"][:, 1:] > 0
    off = (logprobs - rows["logprobs"][:, 1:])[sampled].abs().max().item() if sampled.any() else 0.0
    return grpo_loss(logprobs, rows), {"rewards/mean": float(rows["scores"].mean()), "mismatch/max_logprob": off}


def image_logprobs(model: Any, batch: Batch, rows: dict[str, torch.Tensor], processor: Any, run: Run) -> torch.Tensor:
    """float32[S, L - 1], of every token but the first of each row. A response in which the model wrote the token of an
    image is not trained: a forward pass would look for one more image."""
    width, row, lines = rows["input_ids"].shape[1] - 1, 0, []
    takes_kinds = "mm_token_type_ids" in inspect.signature(model.forward).parameters
    for group in batch.groups:
        pixels = pixels_of(group, processor, run)
        for _ in range(len(group)):
            ids = rows["input_ids"][row : row + 1, : int(rows["attention_mask"][row].sum())]
            shown = ids == processor.image_token_id
            if shown[:, len(group.prompt_ids) :].any():
                rows["loss_mask"][row] = 0
                lines.append(torch.zeros(width))
            else:
                kinds = {"mm_token_type_ids": shown.int()} if takes_kinds else {}
                logits = model(input_ids=ids, **pixels, **kinds).logits[0, :-1]
                found = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1)
                lines.append(pad(found, (0, width - len(found))))
            row += 1
    return torch.stack(lines)


def pixels_of(group: RolloutGroup, processor: Any, run: Run) -> dict[str, torch.Tensor]:
    """What the model is given beside the tokens of a group's prompt; nothing where it shows no images."""
    assert run.media
    files = [run.media.read(ref.uri, MOST_BYTES) for ref in group.multimodal]
    images = [Image.open(BytesIO(file)).convert("RGB") for file in files]
    return dict(processor.image_processor(images=images, return_tensors="pt")) if images else {}
