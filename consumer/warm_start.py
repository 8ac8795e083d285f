"""Warm start: a short supervised phase that teaches a random model part of a task, before GRPO.

The demonstrations are correct answers. The model is **stopped early**: as soon as its greedy accuracy on
problems held back from the training ones reaches `stop_accuracy`. What reinforcement learning starts from is
thus an under-trained model, right sometimes and wrong often, that has learned from clean data and was not
spoilt on purpose. Choose problems that cover every kind of answer (for sums: as many negative as other ones):
what a model never samples, GRPO cannot reinforce.

Invariant: `out_dir` is a complete model folder or does not exist; the same inputs and seed give the same
weights (on one machine with one thread count).
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
from consumer.model_folder import load_model, load_tokenizer, save_model
from consumer.warm_start_config import WarmStartConfig

IGNORED = -100


class Problem(NamedTuple):
    """A prompt (chat messages) and the answer that is demonstrated."""

    messages: list[dict[str, str]]
    answer: str


class WarmStartProgress(NamedTuple):
    """What the caller's progress display is told. `accuracy` is the newest measured, 0.0 before the first."""

    step: int
    max_steps: int
    loss: float
    accuracy: float


ProgressCallback = Callable[[WarmStartProgress], None]


def read_problems(path: Path) -> list[Problem]:
    """Problems of a JSONL file: `{"messages": [{"role", "content"}, ...], "ground_truth": "..."}` per line.

    Other keys are ignored. Raises DatasetError with the line's number.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DatasetError(f"{path}: cannot read the problems: {error.strerror}") from error
    return [_problem(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def warm_start(
    model_dir: Path,
    out_dir: Path,
    problems: Sequence[Problem],
    config: WarmStartConfig,
    progress: ProgressCallback | None = None,
) -> WarmStartProgress:
    """Train the model of `model_dir` on the problems; write it and its tokenizer to the new folder `out_dir`.

    Returns the last progress. Raises DatasetError where there are too few problems, ModelError where a folder
    is unusable.
    """
    tokenizer = load_tokenizer(model_dir)
    model = load_model(model_dir).train()
    examples = [_encode(tokenizer, problem) for problem in problems]
    held_back = config.development_problems
    if len(examples) < held_back + config.batch_size:
        raise DatasetError(
            f"the warm start has {len(examples)} problems",
            hint=f"it needs at least development_problems + batch_size = {held_back + config.batch_size}",
        )
    last = _train(model, examples[:-held_back], _pad(examples[-held_back:]), config, progress or _ignore)
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
    draw = np.random.default_rng(config.seed)
    # beta2 0.98: with some hundred steps the second moment has to follow quickly.
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    accuracy = loss = 0.0
    for step in range(1, config.max_steps + 1):
        batch = [examples[i] for i in draw.choice(len(examples), config.batch_size, replace=False)]
        optimizer.param_groups[0]["lr"] = config.learning_rate * min(1.0, step / config.warmup_steps)
        loss = _step(model, optimizer, *_pad(batch))
        if step % config.check_every_steps == 0:
            accuracy = _accuracy(model, *development)
        progress(WarmStartProgress(step, config.max_steps, loss, accuracy))
        if accuracy >= config.stop_accuracy:
            break
    return WarmStartProgress(step, config.max_steps, loss, accuracy)


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> float:
    logits = model(input_ids=inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def _accuracy(model: PreTrainedModel, inputs: Tensor, labels: Tensor) -> float:
    # A greedy answer is right exactly where every token of it is the argmax given the right tokens before it,
    # so one forward pass measures it and nothing has to be generated.
    guesses = model(input_ids=inputs, use_cache=False).logits.argmax(-1)
    right = ((guesses == labels) | (labels == IGNORED)).all(-1)
    return float(right.float().mean())


def _encode(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> _Example:
    prompt: Any = tokenizer.apply_chat_template(
        problem.messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    answer = tokenizer.encode(problem.answer, add_special_tokens=False)
    return _Example(list(prompt), [*answer, int(tokenizer.eos_token_id)])


def _pad(examples: Sequence[_Example]) -> tuple[Tensor, Tensor]:
    """(inputs, labels), int64[B, W], padded on the right; column t of labels holds the token of t + 1."""
    width = max(len(e.prompt) + len(e.answer) for e in examples)
    inputs = np.zeros((len(examples), width), np.int64)
    labels = np.full((len(examples), width), IGNORED, np.int64)
    for row, (prompt, answer) in enumerate(examples):
        inputs[row, : len(prompt) + len(answer)] = prompt + answer
        labels[row, len(prompt) - 1 : len(prompt) - 1 + len(answer)] = answer
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def _problem(line: bytes, where: str) -> Problem:
    try:
        record = orjson.loads(line)
        return Problem(record["messages"], str(record["ground_truth"]))
    except orjson.JSONDecodeError as error:
        raise DatasetError(f"{where}: not JSON: {error}") from error
    except (KeyError, TypeError) as error:
        hint = "it needs messages and ground_truth"
        raise DatasetError(f"{where}: not a problem: {error!r}", hint=hint) from error


def _ignore(_: WarmStartProgress) -> None:
    """The progress of a caller that does not want any."""
