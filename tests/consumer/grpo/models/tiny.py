"""What the tests of the training side share: a tiny model, and random groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status
from buffer.wire.sampling_mask import SamplingMask
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy.micro_batch import TrainBatch
from consumer.grpo.policy.policy import Policy
from rolloutmq.config.small_model import TinyModelConfig
from rolloutmq.extensions.demo.tiny_model import build_tiny_model

SPEC = TinyModelConfig(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=48)


def build_model(folder: Path, *, seed: int = 0, **changes: int) -> Path:
    """Create a tiny model folder below `folder`; `changes`: of `SPEC`."""
    path = folder / f"model-{seed}"
    build_tiny_model(path, SPEC.model_copy(update=changes), seed)
    return path


def make_group(
    seed: int, *, prompt: int = 6, lengths: Sequence[int] = (3, 5, 1, 4), kept: int = 0
) -> RolloutGroup:
    """Return a group of random tokens, logprobs, masks and scores 0 or 1.

    `kept`: how many words each token was sampled from; 0: from all.
    """
    draw = np.random.default_rng(seed)
    prompt_ids = draw.integers(6, 90, prompt)
    states = [
        RolloutState(
            index=index,
            prompt_ids=prompt_ids,
            response_ids=draw.integers(6, 90, length),
            logprobs=draw.uniform(-5, -3, length),
            response_mask=draw.random(length) > 0.2,
            reward={"score": float(index % 2)},
            status=Status.COMPLETED,
        )
        for index, length in enumerate(lengths)
    ]
    for state in states if kept else ():
        others = draw.integers(6, 90, (len(state.response_ids), kept - 1))
        ids = np.column_stack([state.response_ids, others]).astype("<i4")
        state.sampling_mask = SamplingMask(np.full(len(ids), kept, "<i4"), ids.ravel())
    return RolloutGroup(f"task-{seed:010d}", "task", states)


def train_step(
    trainer: Policy | TrainController,
    groups: Sequence[RolloutGroup],
    advantages: NDArray[np.float32],
) -> dict[str, float]:
    """Train on one batch with given advantages, float32[sum k], as `TrainController.fit` does."""
    controller = TrainController(trainer) if isinstance(trainer, Policy) else trainer
    batch = controller.pack(groups, keep=controller.keep(advantages))
    batch = controller.compute_old_logprobs(batch)
    batch = controller.compute_ref_logprobs(batch)
    set_advantages(batch, advantages)
    return controller.train(batch)


def set_advantages(batch: TrainBatch, advantages: NDArray[np.float32]) -> None:
    """Give every token its rollout's advantage: float32[sum k], in the order of groups."""
    ends = np.cumsum([len(group) for group in batch.groups])[:-1]
    own = zip(np.split(np.asarray(advantages, np.float32), ends), batch.groups, strict=True)
    batch.set_advantages([np.repeat(values, group.lengths) for values, group in own])


def taught(group: RolloutGroup, *teachers: str, k: int = 3, members: int = 3) -> RolloutGroup:
    draw = np.random.default_rng(len(group.response_ids))
    states = group.states
    for state in states[:members]:
        size = len(state.response_ids)
        ids = {name: draw.permuted(np.tile(np.arange(90), (size, 1)), axis=1) for name in teachers}
        mass = {name: draw.dirichlet(np.ones(k + 1), size) for name in teachers}
        drawn = {name: draw.uniform(-6, -1, size) for name in teachers}
        state.teacher_logprobs = {name: own.astype(np.float32) for name, own in drawn.items()}
        state.teacher_top_ids = {name: ids[name][:, :k] for name in teachers}
        tops = {name: np.log(own[:, :k]).astype(np.float32) for name, own in mass.items()}
        state.teacher_top_logprobs = tops
    return RolloutGroup(group.gid, group.task, states)
