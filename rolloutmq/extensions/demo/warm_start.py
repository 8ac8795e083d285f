"""Warm start: a short supervised phase that teaches a random model part of a task, before GRPO.

It stops once the greedy accuracy on held-out problems reaches `stop_accuracy`, so the model is
often wrong, but has learned from correct answers only. Choose problems that cover every kind of
answer (for sums, also negative ones): GRPO cannot reinforce what a model never samples.

Invariant: `out_dir` is a complete model folder or does not exist; the same inputs and seed give the
same weights (on one machine with one thread count).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from buffer.errors import DatasetError
from buffer.weights.new_folder import new_folder
from consumer.grpo.models.model_folder import load_model, load_tokenizer, save_model
from producer_workers.datasets.records import HINT, problem_of
from rolloutmq.config.small_model import WarmStartConfig

IGNORED = -100  # the default of `cross_entropy` for positions without a loss


class Demonstration(NamedTuple):
    messages: list[dict[str, str]]
    answer: str


class WarmStartProgress(NamedTuple):
    """The arguments of a progress callback; `accuracy` is the newest measured, at first 0.0."""

    step: int
    max_steps: int
    loss: float
    accuracy: float


ProgressCallback = Callable[[WarmStartProgress], None]


def read_problems(path: Path) -> list[Demonstration]:
    """Return the problems of a JSONL file in the form of a data set, with their answers.

    Raises DatasetError with the number of the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DatasetError(f"{path}: cannot read the problems: {error.strerror}") from error
    return [
        _parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]


def warm_start(
    model_dir: Path,
    out_dir: Path,
    problems: Sequence[Demonstration],
    config: WarmStartConfig,
    progress: ProgressCallback | None = None,
) -> WarmStartProgress:
    """Train the model of `model_dir` on the problems, and write it with its tokenizer to `out_dir`.

    Returns the last progress. Raises DatasetError where there are too few problems, ModelError
    where `model_dir` is not a model or `out_dir` exists.
    """
    tokenizer = load_tokenizer(model_dir)
    model = load_model(model_dir).train()
    examples = [_encode(tokenizer, problem) for problem in problems]
    held_out = config.development_problems
    least = held_out + config.batch_size
    if len(examples) < least:
        raise DatasetError(
            f"the warm start has {len(examples)} problems",
            hint=f"it needs at least development_problems + batch_size = {least}",
        )
    development = _pad(examples[-held_out:])
    last = _train(model, examples[:-held_out], development, config, progress or (lambda _: None))
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out_dir) as folder:
        save_model(model, folder)
        tokenizer.save_pretrained(folder)
    return last


class _Example(NamedTuple):
    prompt: list[int]
    answer: list[int]


def _train(
    model: PreTrainedModel,
    examples: list[_Example],
    development: tuple[Tensor, Tensor],
    config: WarmStartConfig,
    progress: ProgressCallback,
) -> WarmStartProgress:
    random = np.random.default_rng(config.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        config.learning_rate,
        # beta2 0.98: the second moment must adapt within some hundred steps
        betas=(0.9, 0.98),
        weight_decay=0.01,
        fused=True,
    )
    accuracy = 0.0
    loss = 0.0
    for step in range(1, config.max_steps + 1):
        chosen = random.choice(len(examples), config.batch_size, replace=False)
        batch = [examples[index] for index in chosen]
        warmup = min(1.0, step / config.warmup_steps)
        optimizer.param_groups[0]["lr"] = config.learning_rate * warmup
        loss = _step(model, optimizer, *_pad(batch))
        if step % config.check_every_steps == 0:
            accuracy = _accuracy(model, *development)
        progress(WarmStartProgress(step, config.max_steps, loss, accuracy))
        if accuracy >= config.stop_accuracy:
            break
    return WarmStartProgress(step, config.max_steps, loss, accuracy)


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor
) -> float:
    logits = model(input_ids=inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def _accuracy(model: PreTrainedModel, inputs: Tensor, labels: Tensor) -> float:
    # A greedy answer is right where each of its tokens is the argmax, given the right tokens
    # before it: one forward pass measures this without generation.
    guesses = model(input_ids=inputs, use_cache=False).logits.argmax(-1)
    right = ((guesses == labels) | (labels == IGNORED)).all(-1)
    return float(right.float().mean())


def _encode(tokenizer: PreTrainedTokenizerBase, problem: Demonstration) -> _Example:
    prompt: Any = tokenizer.apply_chat_template(
        problem.messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    answer = tokenizer.encode(problem.answer, add_special_tokens=False)
    return _Example(list(prompt), [*answer, int(tokenizer.eos_token_id)])


def _pad(examples: Sequence[_Example]) -> tuple[Tensor, Tensor]:
    """Return (inputs, labels), int64[B, W] each, padded on the right.

    Column t of the labels holds the token of position t + 1.
    """
    width = max(len(example.prompt) + len(example.answer) for example in examples)
    inputs = np.zeros((len(examples), width), np.int64)
    labels = np.full((len(examples), width), IGNORED, np.int64)
    for row, (prompt, answer) in enumerate(examples):
        inputs[row, : len(prompt) + len(answer)] = prompt + answer
        labels[row, len(prompt) - 1 : len(prompt) - 1 + len(answer)] = answer
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def _parse(line: bytes, where: str) -> Demonstration:
    try:
        problem = problem_of(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        raise DatasetError(f"{where}: not valid JSON: {error}") from error
    except ValueError as error:
        raise DatasetError(f"{where}: not a problem: {error}", hint=HINT) from error
    if problem.ground_truth is None:
        raise DatasetError(f"{where}: there is no answer", hint=HINT)
    return Demonstration(problem.messages, str(problem.ground_truth))
