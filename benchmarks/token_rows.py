"""Where sampled tokens go, by max_staleness and by what becomes of groups that are too old.

Simulated workers with long-tailed lengths and a trainer with a fixed step time. At the end of each
run, once nobody samples, the account of tokens must have exactly what the engines have counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from benchmarks.figure import Figure
from benchmarks.fleet import read_meters
from benchmarks.idle import LONGEST, SHAPES
from benchmarks.server import BenchServer
from benchmarks.simulated_run import TASK, simulated_run
from buffer.ledger.tokens import TokenAccount
from buffer.wire.rollout import PolicyVersion
from producer_workers.simulation.setting import Setting, drawn_lengths

SECTION = "tokens"
AT_ONCE = 5
"""Runs side by side: each takes a small part of a processor."""
WAYS = ("drop", "retry", "wait")
FLEET = Setting(
    workers=4,
    sequences=32,
    concurrency=8,
    group_size=4,
    batch_size=16,
    token_s=0.01,
    first_token_s=0.02,
    step_s=1.5,
)


def token_rows(server: BenchServer, steps: int, ages: Sequence[int]) -> Iterator[Figure]:
    """Return the tokens of each row, for every way and staleness."""
    questions = [(way, age) for way in WAYS for age in ages]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda asked: _play(server, steps, *asked), questions))
    for (way, age), (account, sampled) in zip(questions, answers, strict=True):
        missing = abs(sampled - account.total)
        yield Figure(SECTION, f"{way}, {age}: missing", missing, "tokens", 0, "less", detail=True)
        for row, tokens in account.table.items():
            yield Figure(SECTION, f"{way}, {age}: {row}", tokens, "tokens", detail=True)
    worst = max(abs(sampled - account.total) for account, sampled in answers)
    yield Figure(SECTION, "sampled tokens without a row, worst setting", worst, "tokens", 0, "less")
    server.clear()


def _play(server: BenchServer, steps: int, way: str, age: int) -> tuple[TokenAccount, int]:
    """Run the real pipeline; return its account, and how many tokens the engines have counted."""
    values = {"max_ahead": age, "max_staleness": age, "on_straggler": way}
    setting = Setting.model_validate(FLEET.model_dump() | values)
    shape = SHAPES["lognormal, sigma 1"]
    lengths = drawn_lengths(shape, setting.group_size, longest=LONGEST)
    name = f"tokens-{way}-{age}"
    with TemporaryDirectory() as folder, simulated_run(server, setting, lengths, name=name) as work:
        save_file({"w": np.zeros(1, dtype=np.float32)}, Path(folder, "model.safetensors"))
        consumer = work.consumer
        for step in range(1, steps + 1):
            consumer.take_batch(step, {TASK: setting.batch_size})
            time.sleep(setting.step_s)
            consumer.commit(step, keep=step)
            with consumer.paused("keep"):
                weights = PolicyVersion(consumer.lineage, step)
                work.run.control.publish_weights(consumer.nonce, weights, folder, "")
        with consumer.paused("drain"):  # until nobody holds a group
            sampled = read_meters(work.fleets).tokens.total()
            account = work.run.account.tokens()[TASK]
    return account, sampled
