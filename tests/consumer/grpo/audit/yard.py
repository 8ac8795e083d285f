"""A run whose weights are real tiny models, and workers that submit what they like."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from buffer.ids import new_nonce, split_group_id
from buffer.job import Job
from buffer.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from consumer.grpo.audit.auditor import Auditor
from consumer.handle.publication import open_sender
from consumer.handle.rollout_consumer import RolloutConsumer
from rolloutmq.config.config import Config
from tests.consumer.handle.crew import Crew

BATCH = 3
DATA = {"kind": "jsonl", "path": "problems.jsonl"}

Change = Callable[[list[RolloutState]], object]


def leave(rollouts: list[RolloutState]) -> None:
    """Submit what the model said."""


class Yard:
    """Version n of the weights is the model with seed n."""

    def __init__(
        self, run: Run, consumer: RolloutConsumer, models: list[Path], folder: Path
    ) -> None:
        self.run = run
        self.consumer = consumer
        self.models = models
        self.config = Config.model_validate(
            {
                "run": {"name": run.name, "dir": folder / "run"},
                "plan": {"steps": 5, "batch_size": BATCH},
                "tasks": {"math": {"judge": "exact_match", "dataset": DATA}},
                "trainer": {"keep_weights": 2, "device": "cpu"},
                "engine": {"kind": "transformers"},
                "audit": {"share": 1.0},
            }
        )
        self.config.run.folder.mkdir(exist_ok=True)
        self.sender = open_sender(self.config, run)
        self.crew = Crew(run, {"math": 100})
        self.crew.register()
        self.nonces: dict[str, str] = {}
        self.draw = np.random.default_rng(5)

    def publish(self, version: int) -> PolicyVersion:
        weights = PolicyVersion(self.consumer.lineage, version)

        def save(folder: Path) -> None:
            shutil.copytree(self.models[version], folder, dirs_exist_ok=True)

        self.consumer.publish_weights(version, *self.sender.write(weights, save))
        self.sender.prune()
        return weights

    def auditor(self) -> Auditor:
        return Auditor(self.run, self.config)

    def claim(self, worker: str, limit: int = 1) -> list[Job]:
        self.crew.produce("math")
        if worker not in self.nonces:
            self.nonces[worker] = new_nonce()
            self.run.fleet.register(worker, self.nonces[worker], {})
        weights = self.run.control.state().weights
        return self.run.jobs.claim(worker, self.nonces[worker], new_nonce(), weights, limit).jobs

    def submit(
        self,
        worker: str,
        change: Change = leave,
        *,
        stamp: PolicyVersion | None = None,
        sampled_by: int | None = None,
        status: Status = Status.COMPLETED,
    ) -> str:
        """Let a worker sample one group with the newest weights, change it, and submit it.

        `stamp`: the weights that it names. `sampled_by`: the version that it runs.
        """
        (job,) = self.claim(worker)
        newest = self.run.control.state().weights
        model = newest.version if sampled_by is None else sampled_by
        group = self.run.buffer.read(job.payload)
        for state in group.states:
            if state.status is not Status.COMPLETED:
                sample(self.models[model], state, stamp or newest, self.draw)
                state.status = status
        change(group.states)
        group = RolloutGroup(job.gid, split_group_id(job.gid)[0], group.states)
        self.run.buffer.submit(worker, job, group, 1)
        return job.gid

    def take(self, step: int) -> list[str]:
        batch = self.consumer.take_batch(step, {"math": BATCH}, deadline_s=400.0)
        return batch.manifest.gids


@cache
def load(model_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def sample(
    model_dir: Path, state: RolloutState, weights: PolicyVersion, draw: np.random.Generator
) -> None:
    """Add random tokens with the logprobs that a model gives them."""
    fresh = draw.integers(6, 90, int(draw.integers(4, 9))).astype("<i4")
    ids = np.concatenate([state.prompt_ids, state.response_ids, fresh])
    with torch.no_grad():
        logits = load(model_dir)(torch.from_numpy(ids[None].astype(np.int64))).logits[0]
    values = logits.log_softmax(-1)[np.arange(len(ids) - 1), ids[1:]].numpy()
    span = VersionSpan(0, len(fresh), weights.version, weights.lineage)
    state.append(fresh, values[-len(fresh) :].astype("<f4"), [span])
    state.finish_reason = "stop"
    state.reward = {"score": float(state.index % 2)}
