"""Run a whole training of a LoRA adapter: a real server, producer, worker and trainer.

It works with any engine, and keeps every published adapter and every trained group.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import AutoModelForCausalLM

from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights.safetensors_files import MODEL_LOADING
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState
from buffer.wire.sampling import SampleParams
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.model_state.weights_folder import WeightsSnapshot
from consumer.grpo.policy.policy import Policy
from consumer.grpo.trainer import Trainer
from consumer.handle.step_log import StepLog
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.producing import WorkerSection
from producer_workers.datasets.records import RecordsDataset, problem_of
from producer_workers.engines.base import Engine
from producer_workers.judges.judge import FunctionJudge
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from rolloutmq.config.config import Config
from rolloutmq.launch.create import create_run
from rolloutmq.testing import Characters

TASK = "sums"
STEPS = 4
TOKENS = 32
PROBLEMS = [{"question": f"{n} + {n} =", "answer": str(2 * n)} for n in range(20)]


def by_place(*, response: str, ground_truth: object, state: RolloutState) -> float:
    """1 or 0: in every group there is something to learn."""
    return float(state.index % 2)


@dataclass
class AdapterRun:
    """A run of the model `model`, below `folder`. `policy`: more of that section."""

    store: Store
    name: str
    folder: Path
    model: Path
    policy: dict[str, Any]
    groups: list[Sequence[RolloutGroup]] = field(default_factory=list)
    """those of each step"""

    @property
    def config(self) -> Config:
        dataset = {"kind": "jsonl", "path": "problems.jsonl"}
        return Config.model_validate(
            {
                "run": {"name": self.name, "dir": self.folder, "seed": 1},
                "plan": {"steps": STEPS, "batch_size": 2},
                "policy": {"model": self.model, **self.policy},
                "tasks": {TASK: {"judge": "exact_match", "dataset": dataset}},
                "trainer": {"device": "cpu"},
                "learner": {"learning_rate": 3e-2, "lora": {"rank": 4, "alpha": 8.0}},
                "engine": {"kind": "vllm", "max_lora_rank": 8},
            }
        )

    def adapter(self, version: int) -> Path:
        return self.folder / "adapters" / str(version)

    def metrics(self) -> list[dict[str, float]]:
        log = StepLog(self.config.run.folder / "steps.jsonl")
        log.read_new()
        return [step.metrics for step in log.steps]

    def worst(self, version: int | None = None) -> float:
        """Return the largest difference between a token's logprob and a forward pass by PEFT.

        The pass uses the adapter of the token's stamp, read by PEFT itself, or that of `version`.
        """
        states = [state for groups in self.groups for group in groups for state in group.states]
        stamps = {span.version for state in states for span in state.spans}
        worst = 0.0
        for number in sorted(stamps) if version is None else [version]:
            model = self._adapted(number)
            for state in states:
                wrong = np.abs(_logprobs(model, state) - state.logprobs)
                theirs = wrong if version is not None else wrong[stamped(state) == number]
                worst = max(worst, float(theirs.max(initial=0.0)))
        return worst

    def versions(self) -> list[set[int]]:
        """Which adapters made the tokens of each step."""
        return [
            {int(v) for g in groups for state in g.states for v in stamped(state)}
            for groups in self.groups
        ]

    def _adapted(self, version: int) -> Any:
        with MODEL_LOADING:  # the worker loads beside this
            base = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        return PeftModel.from_pretrained(base, self.adapter(version)).eval()

    async def play(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        """Run all steps, with an engine that was started with the model.

        A worker ends by itself when the run is over.
        """
        self._watch(patch)
        run = create_run(self.store, self.config, self.model)
        loop = SingleTurnAgentLoop(
            judge=FunctionJudge("by_place", by_place), tokenizer=Characters(), eos_ids=set()
        )
        limits = WorkerSection(drain_timeout_s=0.0)
        worker = Worker(run, engine, {TASK: TaskRunner(loop)}, limits, worker_id="w0")
        working = asyncio.create_task(worker.run())
        try:
            with producing(run):
                training = asyncio.create_task(
                    asyncio.to_thread(Trainer(run, self.config, self.model).fit)
                )
                await asyncio.wait({training, working}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
                assert await training
        finally:
            worker.stop()
            await working
        assert run.account.fsck().clean

    def _watch(self, patch: pytest.MonkeyPatch) -> None:
        original = TrainController.train
        snapshot = Policy.snapshot

        def train(controller: TrainController, batch: Any) -> dict[str, float]:
            self.groups.append(batch.groups)
            return original(controller, batch)

        def take(policy: Policy, *, to_publish: bool = False) -> WeightsSnapshot:
            taken = snapshot(policy, to_publish=to_publish)
            if to_publish:
                (kept := self.adapter(policy.step)).mkdir(parents=True, exist_ok=True)
                taken.write(kept)
            return taken

        patch.setattr(TrainController, "train", train)
        patch.setattr(Policy, "snapshot", take)


def stamped(state: RolloutState) -> NDArray[np.int64]:
    """Return the version of each token, from spans that must cover the response."""
    versions = [span.version for span in state.spans for _ in range(span.length)]
    assert state.logprobs is not None
    assert len(versions) == len(state.response_ids) == len(state.logprobs) > 0
    return np.array(versions)


@torch.no_grad()
def _logprobs(model: Any, state: RolloutState) -> NDArray[np.float32]:
    """float32[n], of the response's tokens."""
    assert state.prompt_ids is not None
    tokens = torch.tensor(np.concatenate([state.prompt_ids, state.response_ids]), dtype=torch.int64)
    logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1].float(), -1)
    column: NDArray[np.float32] = logprobs.gather(1, tokens[1:, None])[
        len(state.prompt_ids) - 1 :, 0
    ].numpy()
    return column


@contextmanager
def producing(run: Run) -> Iterator[None]:
    # no min_tokens: what forbids the end of a text changes the distribution, which a learner does
    # not know
    dataset = RecordsDataset(PROBLEMS, "problems", problem_of)
    params = SampleParams(max_tokens=TOKENS)
    sampler = Sampler(TASK, dataset, Characters(), params, prompt_repeat_k=4)
    producer = Producer(run, {TASK: sampler}, strategies_of(run.limits))
    stop = threading.Event()
    thread = threading.Thread(target=producer.produce_loop, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
