"""Estimate the seconds of a train step with the simulator; device speeds are assumed (`Device`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from producer_workers.config.distribution import Distribution, LogNormal
from producer_workers.config.task import TaskSection
from producer_workers.simulation.event_model import simulate
from producer_workers.simulation.setting import Setting, drawn_lengths
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
    """Yield the estimate (`prompt`: tokens): for a CPU if the model is small and no GPU is here.

    All tasks count as the one with the longest responses.
    """
    device = CPU if shape.parameters < SMALL and not gpus else H100
    tasks = [config.tasks[name] for name in config.training_tasks]
    task = max(tasks, key=lambda task: task.prompt_repeat_k * task.sample.max_tokens)
    longest = task.sample.max_tokens
    times = config.engine.times
    default = LogNormal(median=max(1.0, MEDIAN_SHARE * longest), sigma=SIGMA)
    lengths = times.response_tokens if times else default
    response = _mean(lengths, longest)
    setting = _setting(config, shape, device, task, prompt, response)
    drawn = drawn_lengths(lengths, setting.group_size, longest=longest)
    outcome = simulate(setting, drawn, min(STEPS, config.plan.steps))
    step_ms = 1000 * outcome.seconds / outcome.steps
    steps = config.plan.steps
    given = "times of [engine]" if times else f"{device.name} for each rank and engine shard"
    yield Finding(
        "time",
        "ok",
        f"about {age(step_ms)} per train step, {age(step_ms * steps)} for {steps} steps; "
        f"workers idle {outcome.worker_idle:.0%}, the trainer {outcome.trainer_idle:.0%}",
        f"assumed: {given}, responses of {response:,.0f} tokens on average, prompts of "
        f"{prompt:,.0f}; `rolloutmq simulate` takes numbers that you measured",
    )


def _mean(distribution: Distribution, most: float = inf) -> float:
    rng = np.random.default_rng(0)
    return float(np.mean([min(distribution.draw(rng), most) for _ in range(256)]))


def _setting(
    config: Config, shape: Shape, device: Device, task: TaskSection, prompt: float, response: float
) -> Setting:
    """Return the fleet; `prompt` and `response`: mean tokens."""
    slots = getattr(config.engine, "max_num_seqs", None) or SLOTS
    held = config.worker.concurrency
    token_s = _token_s(config, shape, device, prompt + MEDIAN_SHARE * task.sample.max_tokens)
    first_token_s = 2 * prompt * shape.active / device.flops
    if times := config.engine.times:
        token_s = max(1e-6, _mean(times.token_s))
        first_token_s = _mean(times.first_token_s)
    tokens = config.plan.batch_size * task.prompt_repeat_k * (prompt + response)
    policy = config.policy
    is_partial = policy.pause_mode == "abort" and config.strategy.enable_partial_rollout
    return Setting(
        workers=config.launch.workers,
        sequences=slots,
        concurrency=ceil(slots / task.prompt_repeat_k) if held == "auto" else held,
        group_size=task.prompt_repeat_k,
        batch_size=config.plan.batch_size,
        token_s=token_s,
        first_token_s=first_token_s,
        step_s=_step_s(config, shape, device, tokens),
        sync_s=0.0 if config.learner.lora else 2 * shape.parameters / WEIGHT_BYTES_PER_S,
        sync_weights_interval=policy.sync_weights_interval,
        max_staleness=policy.max_staleness,
        max_ahead=policy.max_ahead,
        on_straggler=config.strategy.on_straggler,
        over_sample_threshold=config.strategy.over_sample_threshold,
        interruption="partial" if is_partial else policy.pause_mode,
    )


def _token_s(config: Config, shape: Shape, device: Device, tokens: float) -> float:
    """Return the seconds per token: a round reads all weights and the cache of each sequence."""
    read = 2 * (shape.active + BUSY * tokens * shape.kv_values)
    return device.token_s + read / (device.bytes_per_s * config.engine.shards)


def _step_s(config: Config, shape: Shape, device: Device, tokens: float) -> float:
    learner = config.learner
    passes = 6 + 2 * learner.gradient_checkpointing + 2 * (learner.updates_per_batch > 1)
    passes += 2 * learner.loss.has_own_reference
    ranks = config.launch.ranks(has_own_loop=config.trainer.loop is not None)
    return passes * shape.active * tokens / (device.flops * ranks)
