"""Train a small model on made-up rollouts by the run's own rules: is anything trained at all?

The filter of batches, the advantages and the loss are those of the config. Where nothing has a
gradient, each setting that is not the default is left out by itself, to find the one that is
responsible.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from buffer.config.section import Section
from buffer.ids import group_id
from buffer.imports import is_dotted_path
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status
from buffer.wire.sampling import SampleParams
from consumer.grpo.models.model_folder import save_model
from producer_workers.judges.judge import add_columns
from rolloutmq.check.finding import Finding, Unit
from rolloutmq.config.config import Config

PROMPT, SHORTEST = 16, 8  # tokens; responses have up to twice as many
MOST_ROLLOUTS = 32
WORDS = range(6, 90)  # token ids of the small model

OF_THE_MACHINE = (
    *("optimizer", "bf16", "fp32_logits", "attn_implementation", "replay_routing", "compile"),
    *("lora", "sharding", "token_budget", "gradient_checkpointing"),
)
"""Keys of [learner] for the run's model and devices: the small model has their defaults."""


def units(config: Config) -> list[Unit]:
    if config.trainer.loop is not None or find_spec("torch") is None:
        return []
    return [
        Unit("training", f"task {name}", partial(_check, config, name))
        for name in config.training_tasks
    ]


def _check(config: Config, task: str) -> Iterator[Finding]:
    defaults = {key: config.learner.default_of(key) for key in OF_THE_MACHINE}
    config = config.model_copy(update={"learner": config.learner.model_copy(update=defaults)})
    what = f"task {task}: of made-up rollouts, every second of them right, "
    with TemporaryDirectory(prefix="rolloutmq-check-") as folder:
        model = Path(folder) / "model"
        _write_model(model)
        try:
            if _gradient(config, task, model) > 0:
                yield Finding("training", "ok", f"{what}some are trained")
                return
        except Exception as error:
            spec = (config.trainer.advantages, config.learner.loss.objective)
            if not any(map(is_dotted_path, spec)):
                raise
            failed = f"task {task}: your function fails with made-up rollouts ({error!r:.200})"
            yield Finding("training", "warning", failed, "see that it can read those of the task")
            return
        responsible = " or ".join(_responsible(config, task, model))
    yield Finding(
        "training",
        "error",
        f"{what}nothing is trained with {responsible or 'this combination of settings'}",
        f"the prompt has {PROMPT} tokens, each response {SHORTEST} to {2 * SHORTEST}: "
        "docs/pages/loss.md",
    )


def _write_model(folder: Path) -> None:
    """Write a model of one layer, with random weights and without a tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=32,
        max_position_embeddings=256,
        initializer_range=0.08,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_model(Qwen3ForCausalLM(config), folder)


def _responsible(config: Config, task: str, model: Path) -> Iterator[str]:
    """Yield the settings without which something is trained."""
    learner = config.learner
    for name, section in (("[trainer]", config.trainer), ("[learner.loss]", learner.loss)):
        for key, value in section:
            if value == section.default_of(key):
                continue
            one: Section = section.model_copy(update={key: section.default_of(key)})
            update = {"trainer": one}
            if section is learner.loss:
                update = {"learner": learner.model_copy(update={"loss": one})}
            if _gradient(config.model_copy(update=update), task, model) > 0:
                yield f"{name} {key} = {value}"


def _gradient(config: Config, task: str, model: Path) -> float:
    """Return the norm of the gradient of a train step on one group, sampled by the model itself."""
    from consumer.grpo.learner.train_controller import TrainController
    from consumer.grpo.policy.policy import Policy

    policy = Policy(model, config.learner)
    controller = TrainController.of(config, policy, model)
    group = _made_up(config, task)
    logprobs = [np.zeros(len(group.mask), np.float32)]
    for update in controller.pack([group]).updates:
        update.batches.fill(logprobs, [policy.logprobs(part) for part in update.batches])
    group.columns["logprobs"] = logprobs[0]
    return controller.fit([group]).get("optim/grad_norm", 0.0)


def _made_up(config: Config, name: str) -> RolloutGroup:
    """Return a group with every token column that the config reads."""
    from consumer.grpo.learner.train_controller import read_columns

    task, draw = config.tasks[name], np.random.default_rng(0)
    read = read_columns(config.trainer.advantages, config.learner)
    states = []
    for n in range(min(task.prompt_repeat_k, MOST_ROLLOUTS)):
        size = min(SHORTEST + n % (SHORTEST + 1), task.sample.max_tokens)
        state = RolloutState(
            index=n,
            prompt_ids=np.resize(WORDS, PROMPT),
            response_ids=draw.choice(WORDS, size),
            logprobs=np.full(size, -1.0),
            reward=dict.fromkeys(("score", *config.trainer.reward_weights), float(n % 2)),
            finish_reason="stop",
            status=Status.COMPLETED,
            sample_params=SampleParams(max_tokens=task.sample.max_tokens),
        )
        for column in ("token_rewards", "values", "ref_logprobs"):
            if read is None or column in read:
                setattr(state, column, _numbers(draw, size))
        for judge in task.attached.values():
            add_columns("made up", [state], [judge.made_up(size, WORDS)])
        states.append(state)
    return RolloutGroup(group_id(name, 0), name, states)


def _numbers(draw: np.random.Generator, size: int) -> NDArray[np.float32]:
    return draw.uniform(-6, -1, size).astype(np.float32)
