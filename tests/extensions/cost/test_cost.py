"""What a run costs: measured in the trainer, continued by the next one, and shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buffer.groups.verdicts import JudgeUse, Verdicts
from buffer.job import SampledTokens
from buffer.redis.store import Store
from consumer.handle.step_log import StepWriter, read_steps
from rolloutmq.extensions.cost import CostSection
from rolloutmq.extensions.cost.command import _costs
from rolloutmq.extensions.cost.meter import CostMeter
from rolloutmq.extensions.llm_judge.section import LlmSection
from rolloutmq.output import money
from tests.buffer.scene import Scene
from tests.servers import Server

HOUR_MS = 3_600_000
PRICES = CostSection(
    currency="EUR",
    worker_gpu_hour=10.0,
    million_sampled_tokens=1e6,
    million_prompt_tokens=2e6,
)
JUDGES = {
    name: LlmSection(
        url="http://h/v1", model=name, million_prompt_tokens=read, million_completion_tokens=wrote
    )
    for name, read, wrote in (("cheap", 0.5e6, 3e6), ("dear", 2e6, 0.0))
}


@pytest.fixture
def scene(server_of: Callable[[str], Server], run_name: str) -> Iterator[Scene]:
    server = server_of("valkey")
    store = Store(server.url)
    with server.connect() as raw:
        yield Scene(store, raw, run_name)
    store.close()


def lived(scene: Scene, worker: str, hours: float, sampling: float) -> None:
    """A worker that has been there for hours, and has sampled for a share of them."""
    scene.worker(worker)
    record = scene.keys.worker(worker)
    joined_ms = scene.now_ms() - int(hours * HOUR_MS)
    report = f"sampling_ms={int(hours * sampling * HOUR_MS)}"
    scene.raw.hset(record, mapping={"joined_ms": joined_ms, "report": report})


def test_gpu_hours_and_tokens_have_a_price_and_a_trainer_that_starts_again_pays_them_once(
    scene: Scene, tmp_path: Path
) -> None:
    scene.enqueue(2)
    jobs = scene.claim(2)
    scene.submit(jobs[0], sampled=SampledTokens(6, 0, 6, 0))  # 4 of them are in the group
    scene.run.jobs.release("w0", jobs[1], "failed", "no", sampled=SampledTokens(5, 0, 11, 6))
    scene.beat([], sampled="math=11:11:7:0")
    lived(scene, "w0", 2.0, 0.25)
    # of the first: one worker that was killed, and the one after it
    for task, completion in (("cheap", 0), ("cheap", 1), ("dear", 7)):
        judge = Verdicts(scene.run.context, task)
        judge.use = JudgeUse(calls=1, prompt_tokens=10, completion_tokens=completion)
        judge.note("any")
    meter = CostMeter(scene.run, PRICES, JUDGES, worker_gpus=2, trainer_gpus=1)
    found = meter.measured(1)
    rows = {name: n for name, n in found.items() if name.startswith("tokens/")}
    assert rows == {"tokens/pool": 4, "tokens/resampled": 2, "tokens/failed": 5}
    assert found["cost/never_trained"] == 1.0
    assert found["cost/worker_gpu_hours"] == pytest.approx(4, rel=0.05)
    assert found["cost/idle_workers"] == pytest.approx(0.75, rel=0.05)
    assert found["cost/total"] == pytest.approx(40 + 11 + 14 + (10 + 3) + 20, rel=0.05)

    StepWriter(tmp_path).add_step(1, "l1", [], found)
    again = CostMeter(scene.run, PRICES, JUDGES, 2, 1, read_steps(tmp_path))
    assert again.measured(2)["cost/total"] == pytest.approx(found["cost/total"], rel=0.05)
    told = _costs(tmp_path)
    assert (told["total"], told["currency"]) == (found["cost/total"], "EUR")


def test_a_batch_that_was_taken_is_paid_for_as_trained(scene: Scene) -> None:
    scene.enqueue(1)
    scene.submit(scene.claim(1)[0], sampled=SampledTokens(6, 0, 6, 0))
    scene.open_trainer()
    scene.take(1, math=1)
    tokens = scene.run.account.tokens()["math"].table
    assert (tokens["trained"], tokens["taken"] > 0) == (0, True)
    prices = CostSection(million_sampled_tokens=3.0)
    found = CostMeter(scene.run, prices, {}, worker_gpus=1, trainer_gpus=1).measured(1)
    assert found["cost/million_trained"] == pytest.approx(3.0 * 6 / tokens["taken"])


@pytest.mark.parametrize(
    ("amount", "shown"), [(1234.5, "1,234.50"), (0.0021, "0.0021"), (0.0, "0.00")]
)
def test_a_small_amount_is_not_shown_as_zero(amount: float, shown: str) -> None:
    assert money(amount) == shown
