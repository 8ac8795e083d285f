"""A producer process for tests that kill it: the real one, with a tokenizer that loads fast."""

from __future__ import annotations

import threading
from pathlib import Path

from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.sampling import SampleParams
from producer_workers.datasets.files import JsonlDataset
from producer_workers.datasets.records import ToProblem, problem_of
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from tests.pipeline.yard import TASK, Letters


def make_producer(
    run: Run,
    dataset: Path,
    share: int,
    *,
    steps: int = 1000,
    threshold: int = 1,
    slice_size: int = 7,
    to_problem: ToProblem = problem_of,
    sample_params: SampleParams | None = None,
) -> Producer:
    """Return a producer that starts `share` groups for every step that the newest weights serve."""
    sampler = Sampler(
        TASK,
        JsonlDataset(dataset, to_problem),
        Letters(),
        sample_params or SampleParams(),
        prompt_repeat_k=2,
        seed=3,
        max_prompt_tokens=50,
    )
    # one task: every group of a batch is its own
    run.limits.adopt(
        run.limits.model_copy(
            update={"batch_size": share, "steps": steps, "stale_threshold": threshold}
        )
    )
    return Producer(run, {TASK: sampler}, strategies_of(run.limits), slice_size=slice_size)


def main(url: str, name: str, dataset: str, share: str) -> None:
    run = Run.open(Store(url), name)
    producer = make_producer(run, Path(dataset), int(share), threshold=run.limits.stale_threshold)
    producer.produce_loop(threading.Event(), take_over=True)
