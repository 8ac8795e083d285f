"""Estimate the seconds of a train step with the simulator; device speeds are assumed (`Device`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from producer_workers.config.engine import Distribution, LogNormal
from producer_workers.config.task import TaskSection
from producer_workers.simulation.event_model import simulate
from producer_workers.simulation.lengths import drawn_lengths
from producer_workers.simulation.setting import Interruption, Outcome, Setting
from rolloutmq.check.finding import Finding
from rolloutmq.check.shape import Shape
from rolloutmq.config.config import Config
from rolloutmq.output import age

STEPS = 12  # simulated train steps
MEDIAN_SHARE = 0.25  # median response length as a share of max_tokens
SIGMA = 0.8  # spread of response lengths, as in `rolloutmq simulate`
PROMPT = 256.0  # tokens of a prompt, if the data could not be read
WEIGHT_BYTES_PER_S = 1e9  # speed at which new weights are written, checked and loaded


@dataclass(frozen=True, slots=True)
class Device:
    """`flops`: per second, in training; `bytes_per_s`: memory reads of the engine.

    `token_s`: further seconds of a round of the engine.
    """

    name: str
    flops: float
    bytes_per_s: float
    token_s: float


H100 = Device("an H100", 350e12, 2e12, 0.006)
CPU = Device("two cores of a CPU", 50e9, 10e9, 0.02)
SMALL = 50_000_000  # parameters below which a model may be meant for a CPU
SLOTS = 256  # sequences of an engine without max_num_seqs
BUSY = 64  # sequences whose KV cache is read in a round, about


def time_findings(
    config: Config, shape: Shape, gpus: int, prompt: float = PROMPT
) -> Iterator[Finding]:
    """Yield the estimate (`prompt`: tokens): for a CPU if the model is small and no GPU is here."""
    device = CPU if shape.parameters < SMALL and not gpus else H100
    lengths = _response_tokens(config)
    setting = _setting(config, shape, device, lengths, prompt)
    task = _largest(config)
    drawn = drawn_lengths(lengths, setting.group_size, longest=task.sample.max_tokens)
    outcome = simulate(setting, drawn, min(STEPS, config.plan.steps))
    yield Finding(
        "time", "ok", _estimate(config, outcome), _assumptions(config, device, lengths, prompt)
    )


def _largest(config: Config) -> TaskSection:
    """Return the training task with the longest prompts in tokens; all tasks count as this one."""
    tasks = [config.tasks[name] for name in config.training_tasks]
    return max(tasks, key=lambda task: task.prompt_repeat_k * task.sample.max_tokens)


def _response_tokens(config: Config) -> Distribution:
    if config.engine.times:
        return config.engine.times.response_tokens
    return LogNormal(
        median=max(1.0, MEDIAN_SHARE * _largest(config).sample.max_tokens), sigma=SIGMA
    )


def _mean(distribution: Distribution, most: float = inf) -> float:
    rng = np.random.default_rng(0)
    return float(np.mean([min(distribution.draw(rng), most) for _ in range(256)]))


def _mean_tokens(config: Config, lengths: Distribution) -> float:
    """Return the mean length of a response, which ends at max_tokens."""
    return _mean(lengths, _largest(config).sample.max_tokens)


def _setting(
    config: Config, shape: Shape, device: Device, lengths: Distribution, prompt: float
) -> Setting:
    engine = config.engine
    slots = getattr(engine, "max_num_seqs", None) or SLOTS
    size = _largest(config).prompt_repeat_k
    held = config.worker.concurrency
    token_s = _token_s(config, shape, device, prompt)
    first_token_s = 2 * prompt * shape.active / device.flops
    if times := engine.times:
        token_s = max(1e-6, _mean(times.token_s))
        first_token_s = _mean(times.first_token_s)
    return Setting(
        workers=config.launch.workers,
        sequences=slots,
        concurrency=ceil(slots / size) if held == "auto" else held,
        group_size=size,
        batch_size=config.plan.batch_size,
        token_s=token_s,
        first_token_s=first_token_s,
        step_s=_step_s(config, shape, device, prompt + _mean_tokens(config, lengths)),
        sync_s=0.0 if config.learner.lora else 2 * shape.parameters / WEIGHT_BYTES_PER_S,
        sync_weights_interval=config.policy.sync_weights_interval,
        max_staleness=config.policy.max_staleness,
        over_sample_threshold=config.strategy.over_sample_threshold,
        interruption=_interruption(config),
    )


def _interruption(config: Config) -> Interruption:
    if config.policy.pause_mode == "abort" and config.strategy.enable_partial_rollout:
        return "partial"
    return config.policy.pause_mode


def _token_s(config: Config, shape: Shape, device: Device, prompt: float) -> float:
    """Return the seconds per token: a round reads all weights and the cache of each sequence."""
    tokens = prompt + MEDIAN_SHARE * _largest(config).sample.max_tokens
    read = 2 * (shape.active + BUSY * tokens * shape.kv_values)
    return device.token_s + read / (device.bytes_per_s * config.engine.shards)


def _step_s(config: Config, shape: Shape, device: Device, sample: float) -> float:
    learner = config.learner
    tokens = config.plan.batch_size * _largest(config).prompt_repeat_k * sample
    passes = 6 + 2 * learner.gradient_checkpointing + 2 * (learner.updates_per_batch > 1)
    passes += 2 * (learner.loss.kl_coef > 0)
    ranks = config.launch.ranks(has_own_loop=config.trainer.loop is not None)
    return passes * shape.active * tokens / (device.flops * ranks)


def _estimate(config: Config, outcome: Outcome) -> str:
    step_s = outcome.seconds / outcome.steps
    whole = age(1000 * step_s * config.plan.steps)
    return (
        f"about {age(1000 * step_s)} per train step, {whole} for {config.plan.steps} steps; "
        f"workers idle {outcome.worker_idle:.0%}, the trainer {outcome.trainer_idle:.0%}"
    )


def _assumptions(config: Config, device: Device, lengths: Distribution, prompt: float) -> str:
    given = (
        "times of [engine]"
        if config.engine.times
        else f"{device.name} for each rank and engine shard"
    )
    response = _mean_tokens(config, lengths)
    return (
        f"assumed: {given}, responses of {response:,.0f} tokens on average, prompts of "
        f"{prompt:,.0f}; `rolloutmq simulate` takes numbers that you measured"
    )
