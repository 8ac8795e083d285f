"""Measure how long workers and trainer wait, against a queue without costs, on the same draws.

Simulated workers with long-tailed lengths and a trainer with a fixed step time, on the embedded
server as a run has it. A response is some seconds long here and minutes in life, so all that the
pipeline costs weighs more than it would.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from benchmarks.figure import Figure
from benchmarks.fleet import read_meters
from benchmarks.server import BenchServer
from benchmarks.simulated_run import TASK, simulated_run
from buffer.ids import group_id, split_group_id
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from buffer.wire.staleness import staleness
from consumer.handle.rollout_consumer import RolloutConsumer
from producer_workers.config.distribution import Bimodal, Distribution, LogNormal
from producer_workers.simulation.event_model import simulate
from producer_workers.simulation.setting import Lengths, Outcome, Setting, candidates, drawn_lengths

TARGET = 0.97
AT_ONCE = 6
"""Runs side by side: each takes a small part of a processor."""

FLEET = Setting(
    workers=16,
    sequences=16,
    concurrency=4,
    group_size=4,
    batch_size=24,
    token_s=0.04,
    first_token_s=0.04,
    step_s=6.0,
)
SHAPES: dict[str, Distribution] = {
    "lognormal, sigma 1": LogNormal(median=80, sigma=1.0),
    "bimodal, 5 % long": Bimodal(short=80, long=600, long_share=0.05),
}
LONGEST = 600


def idle(server: BenchServer, steps: int, ages: Sequence[int]) -> Iterator[Figure]:
    """Return every combination of lengths, max_staleness and interruption of running groups."""
    settings = [
        setting
        for age in ages
        for setting in candidates(FLEET, [age], ["keep", "partial", "abort"], ahead=[age])
    ]
    questions = [(shape, setting) for shape in SHAPES for setting in settings]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(partial(_ask, server, steps), questions))
    for (shape, setting), (real, ideal) in zip(questions, answers, strict=True):
        yield from _figures(f"idle, {shape}", setting, real, ideal)
    server.clear()


def _ask(server: BenchServer, steps: int, question: tuple[str, Setting]) -> tuple[Outcome, Outcome]:
    shape, setting = question
    lengths = drawn_lengths(SHAPES[shape], setting.group_size, longest=LONGEST)
    name = f"idle-{shape.partition(',')[0]}-{setting.max_staleness}-{setting.interruption}"
    return play(server, setting, lengths, steps, name), simulate(setting, lengths, steps)


def _figures(section: str, setting: Setting, real: Outcome, ideal: Outcome) -> Iterator[Figure]:
    name = f"staleness {setting.max_staleness}, {setting.interruption}"
    yield Figure(section, f"{name}: pipeline / ideal", ideal.seconds / real.seconds, "x", TARGET)
    for kind, outcome in (("pipeline", real), ("ideal", ideal)):
        shares = {
            "workers idle": outcome.worker_idle,
            "trainer waits": outcome.trainer_idle,
            "waste": outcome.waste,
        }
        for what, share in shares.items():
            yield Figure(section, f"{name}: {what}, {kind}", 100 * share, "%", detail=True)


def play(server: BenchServer, setting: Setting, lengths: Lengths, steps: int, name: str) -> Outcome:
    """Run the real pipeline until train step `steps` is done."""
    ages: Counter[int] = Counter()
    held: dict[str, int] = {}
    trained: list[int] = []
    with TemporaryDirectory() as folder, simulated_run(server, setting, lengths, name=name) as work:
        save_file({"w": np.zeros(1, dtype=np.float32)}, Path(folder, "model.safetensors"))
        for step in range(1, steps + 1):
            batch = work.consumer.take_batch(step, {TASK: setting.batch_size})
            ages.update(staleness(step, entry.version or 0) for entry in batch.manifest.entries)
            held |= {group.gid: int(group.lengths.sum()) for group in batch.groups}
            trained += [int(tokens) for group in batch.groups for tokens in group.lengths]
            time.sleep(setting.step_s)
            if step < steps:
                work.consumer.commit(step, keep=step)
                _update(work.run, work.consumer, setting, step, folder)
        seconds = time.monotonic() - work.started_s
        meter = read_meters(work.fleets)
        old = _old_groups(work.run, setting, steps, held)
    again = sum(meter.tokens[gid] - tokens for gid, tokens in held.items())
    return Outcome(
        seconds=seconds,
        steps=steps,
        groups=len(held),
        trained_tokens=sum(held.values()),
        wasted_tokens=again + sum(meter.tokens[gid] for gid in old),
        busy_s=meter.busy_s,
        capacity_s=setting.workers * setting.sequences * seconds,
        held=float("nan"),
        trainer_busy_s=steps * setting.step_s,
        staleness=dict(sorted(ages.items())),
        trained_lengths=trained,
        expired_lengths=[n for gid in old for n in lengths(split_group_id(gid)[1])],
    )


def _update(run: Run, consumer: RolloutConsumer, setting: Setting, step: int, folder: str) -> None:
    if step % setting.sync_weights_interval:
        return
    with consumer.paused("abort" if setting.interruption == "partial" else setting.interruption):
        weights = PolicyVersion(consumer.lineage, step)
        run.control.publish_weights(consumer.nonce, weights, folder, "")


def _old_groups(run: Run, setting: Setting, steps: int, held: dict[str, int]) -> list[str]:
    """Return the groups that expired."""
    drawn = {group_id(TASK, draw) for draw in range(run.jobs.cursor(TASK))}
    return [gid for gid in drawn - held.keys() if _is_old(run.record(gid), setting, steps)]


def _is_old(record: dict[str, str], setting: Setting, steps: int) -> bool:
    if record.get("stage", "ended") not in ("pool", "ended"):
        return False
    version = record.get("version")
    return not record or (
        bool(version) and staleness(steps + 1, int(version or 0)) >= setting.stale_threshold
    )
