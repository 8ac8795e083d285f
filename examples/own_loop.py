"""A loop of yours that produces, takes, trains, commits and publishes: one process, a real server.

    python -m examples.own_loop FOLDER

Put your model where `train` and `save_weights` are, an engine of yours (or vLLM, in processes of
their own: `rolloutmq worker`) where the simulated one is, and your problems where PROBLEMS are.
Nothing else is needed from this project.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from buffer.control.control import Mode
from buffer.control.task_status import ProduceBatchStatus
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights.shared_folder import FolderSender
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState
from buffer.wire.sampling import SampleParams
from consumer.handle.publication import publish
from consumer.handle.rollout_consumer import RolloutConsumer
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.datasets.records import RecordsDataset, problem_of
from producer_workers.engines.simulated import SimulatedEngine
from producer_workers.judges.judge import FunctionJudge
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from rolloutmq.testing import Characters

PROBLEMS = [{"question": f"{n} + {n} =", "answer": str(2 * n)} for n in range(20)]


def judge(*, response: str, ground_truth: str, state: RolloutState) -> float:
    return float(ground_truth in response)


def train(weights: np.ndarray, groups: Sequence[RolloutGroup]) -> np.ndarray:
    """Stands for your optimizer: columns of all rollouts are there as numpy arrays."""
    return weights + np.float32(np.mean([group.scores.mean() for group in groups]))


def save_weights(weights: np.ndarray, folder: Path) -> None:
    save_file({"w": weights}, folder / "model.safetensors")


def main(folder: Path, steps: int = 4) -> list[str]:
    """One line about each step."""
    with EmbeddedServer(folder / "server") as server:
        store = Store(server.url)
        limits = RunLimits(
            steps=steps, batch_size=4, stale_threshold=2, tasks={"sums": TaskLimits()}
        )
        run = Run.create(store, "own-loop", new_nonce(), limits)
        with serving(run):
            lines = loop(run, folder, steps)
        store.close()
    return lines


def loop(run: Run, folder: Path, steps: int) -> list[str]:
    dataset = RecordsDataset(PROBLEMS, "problems", problem_of)
    sampler = Sampler("sums", dataset, Characters(), SampleParams(max_tokens=16), prompt_repeat_k=2)
    producer = Producer(run, {"sums": sampler}, strategies_of(run.limits))
    consumer, weights, lines = RolloutConsumer(run), np.zeros(1, dtype=np.float32), []
    sender = FolderSender(folder / "weights")
    consumer.open()  # or at the position of your checkpoint
    with producer.opened():
        for step in range(1, steps + 1):
            made = producer.produce_batch(step, deadline_s=60.0)
            assert made.status is ProduceBatchStatus.NORMAL
            batch = consumer.take_batch(step, run.limits.mix().shares(step))
            weights = train(weights, batch.groups)
            np.save(folder / "checkpoint.npy", weights)  # your checkpoint, on disk; only then:
            consumer.commit(step, keep=step)
            # workers freeze, load them and continue
            publish(consumer, sender, step, partial(save_weights, weights), pause="keep")
            tokens = made.made["sums"].produced_tokens
            lines.append(f"step {step}: {len(batch.groups)} groups, made {tokens} tokens")
    consumer.finish()
    consumer.close()
    return lines


class serving:
    """A worker on a thread of its own; on a cluster, `rolloutmq worker` on every GPU."""

    def __init__(self, run: Run) -> None:
        self._run, self._thread = run, threading.Thread(target=lambda: asyncio.run(self._work()))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        # a worker leaves by itself when the run is finished; the loop may have failed before
        self._run.control.set_mode("operator", Mode.FINISH)
        self._thread.join()

    async def _work(self) -> None:
        quick = Fixed(value=0.001)
        config = SimulatedConfig(
            response_tokens=Fixed(value=16),
            first_token_s=quick,
            token_s=quick,
            vocab_size=95,
            eos_token_id=0,
        )
        engine = SimulatedEngine(config, FIRST_WEIGHTS)
        await engine.start()
        agent_loop = SingleTurnAgentLoop(
            judge=FunctionJudge("judge", judge), tokenizer=Characters(), eos_ids={0}
        )
        await Worker(self._run, engine, {"sums": TaskRunner(agent_loop)}, worker_id="w0").run()


if __name__ == "__main__":
    sys.stdout.write("\n".join(main(Path(sys.argv[1]))) + "\n")
