"""`python -m benchmarks.updates [LEARNING_RATE]`: weight updates while vLLM samples, by KV cache.

A small model learns to count; then a GRPO step with random rewards precedes each update, which
comes in the middle of 64 responses, with `prefix_cache` "keep", then "clear". Reported are the
longest time without a new token, beside the same load into an idle engine; the tokens that are
prefilled again; and how far the logprobs of the tokens behind the update are from a forward pass
with the weights that they are stamped with, beside how far one version is from the next.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.figure import Figure
from benchmarks.report import print_table
from buffer.ids import group_id
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion, RolloutState, Status
from buffer.wire.sampling import SampleParams
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy.policy import Policy
from producer_workers.agent_loops.tokenizer import load_tokenizer
from producer_workers.config.engine import VllmConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine, Generation
from rolloutmq.config.small_model import TinyModelConfig, WarmStartConfig
from rolloutmq.extensions.demo.tiny_model import build_tiny_model
from rolloutmq.extensions.demo.warm_start import Demonstration, warm_start

SAMPLED = 64
MEMBERS = 8
TOKENS = 160
UPDATES = 4
MODES = ("keep", "clear")
START_S = 0.2
"""Seconds from the requests to the update."""

NEAR = 40
"""Forward passes, from the last one before an update on, among which the longest gap is sought."""


Sample = Callable[[], Awaitable[Sequence[Generation]]]
"""Makes the requests that run during an update, and returns their responses."""


@dataclass(frozen=True, slots=True)
class Update:
    """A weight update while requests run.

    `gap_s`: the longest time without a token. `update_s`: the whole call. `swap_s`: the same load
    into the processes of the idle engine. `prefilled`: tokens that were prefilled again.
    """

    gap_s: float
    update_s: float
    swap_s: float
    prefilled: int
    made: Sequence[Generation]


class WatchedUpdates:
    """Updates a vLLM engine while requests run, and watches when each forward pass ends."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._process = engine._llm.output_processor.process_outputs
        self._record = engine._statistics.record
        self._ends: list[float] = []
        self._prefilled = 0
        self._updates = 0
        engine._llm.output_processor.process_outputs = self._see_tokens
        engine._statistics.record = self._see_statistics

    async def update(self, folder: Path, sample: Sample) -> Update:
        """Update the engine to the weights in `folder`, in the middle of what `sample` asks for."""
        began = time.perf_counter()
        await self._engine._load(folder)
        swap_s = time.perf_counter() - began
        await self._engine._load(self._engine._loaded_from)
        running = asyncio.ensure_future(sample())
        await asyncio.sleep(START_S)
        self._ends = self._ends[-1:]
        self._prefilled = 0
        self._updates += 1
        began = time.perf_counter()
        await self._engine.load_weights(folder, PolicyVersion("bench", self._updates))
        update_s = time.perf_counter() - began
        made = await running
        gaps = np.diff(self._ends[:NEAR])
        return Update(float(gaps.max()), update_s, swap_s, self._prefilled, made)

    def _see_tokens(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(output.new_token_ids for output in outputs):
            self._ends.append(time.perf_counter())
        return self._process(outputs, *args, **kwargs)

    def _see_statistics(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        if scheduler_stats is not None:
            cache = scheduler_stats.prefix_cache_stats
            self._prefilled += cache.preempted_queries - cache.preempted_hits
        self._record(scheduler_stats, *args, **kwargs)


def figures_of(section: str, updates: Sequence[Update]) -> Iterator[Figure]:
    """Return how long nothing was sampled; the first update is a warm-up."""
    gaps = [1000 * update.gap_s for update in updates[1:]]
    pauses = [update.update_s / update.swap_s for update in updates[1:]]
    yield Figure(section, "nothing is sampled, p50", median(gaps), "ms")
    yield Figure(section, "nothing is sampled, longest", max(gaps), "ms")
    yield Figure(section, "update / swap of an idle engine", median(pauses), "", 2, "less")
    missing = sum(
        len(made.token_ids) - sum(span.length for span in made.spans)
        for update in updates
        for made in update.made
    )
    yield Figure(section, "tokens without a version", missing, "", 0, "less")


def main(learning_rate: float) -> None:
    with TemporaryDirectory(prefix="rmq-bench-") as name:
        model = _counting_model(Path(name))
        for mode in MODES:
            print_table(list(asyncio.run(_run(Path(name, mode), model, mode, learning_rate))))


def _counting_model(folder: Path) -> Path:
    build_tiny_model(folder / "random", TinyModelConfig(max_positions=512), 0)
    problems = [
        Demonstration(
            [{"role": "user", "content": f"State the final answer: {first} + {step} ="}],
            " ".join(str(first + step * place) for place in range(60)),
        )
        for first in range(30)
        for step in range(1, 9)
    ]
    config = WarmStartConfig(
        max_steps=60, check_every_steps=1000, batch_size=8, development_problems=8
    )
    warm_start(folder / "random", folder / "counts", problems, config)
    return folder / "counts"


async def _run(folder: Path, model: Path, mode: str, learning_rate: float) -> Iterator[Figure]:
    config = VllmConfig.model_validate(
        {
            "max_model_len": 512,
            "max_num_seqs": SAMPLED,
            "omp_threads": 1,
            "report_load": True,
            "prefix_cache": mode,
        }
    )
    trainer = Policy(model, LearnerConfig(learning_rate=learning_rate, warmup_steps=0))
    engine = build_engine(config, model, FIRST_WEIGHTS)
    await engine.start()
    prompt = _prompt(model)
    folders = [model]
    updates: list[Update] = []
    far = []
    try:
        watched = WatchedUpdates(engine)
        made: Sequence[Generation] = await _sample(engine, prompt)
        for number in range(UPDATES + 1):
            TrainController(trainer, "grpo").fit(_groups(prompt, made))
            folders.append(folder / str(number))
            trainer.save_weights(folders[-1])
            updates.append(await watched.update(folders[-1], lambda: _sample(engine, prompt)))
            made = updates[-1].made
            far.append(_distances(folders[-2:], prompt, made))
    finally:
        await engine.shutdown()
    return _figures(mode, updates, far)


def _prompt(model: Path) -> np.ndarray:
    tokenizer: Any = load_tokenizer(str(model))
    return np.array(tokenizer.encode("State the final answer: 7 + 3 ="), dtype="<i4")


async def _sample(engine: Engine, prompt: np.ndarray) -> list[Generation]:
    params = SampleParams(max_tokens=TOKENS, min_tokens=TOKENS)
    return await asyncio.gather(
        *(
            engine.generate(f"{group_id('count', n // MEMBERS)}/{n % MEMBERS}", prompt, params)
            for n in range(SAMPLED)
        )
    )


def _groups(prompt: np.ndarray, made: Sequence[Generation]) -> list[RolloutGroup]:
    states = [_state(prompt, number % MEMBERS, one) for number, one in enumerate(made)]
    return [
        RolloutGroup(group_id("count", first // MEMBERS), "count", states[first : first + MEMBERS])
        for first in range(0, SAMPLED, MEMBERS)
    ]


def _state(prompt: np.ndarray, index: int, made: Generation) -> RolloutState:
    state = RolloutState(index=index, prompt_ids=prompt, messages=[])
    state.append(made.token_ids, made.logprobs, list(made.spans))
    state.status = Status.COMPLETED
    state.finish_reason = made.finish_reason
    state.reward = {"score": float(made.token_ids[-1] % 2)}
    return state


def _distances(
    folders: Sequence[Path], prompt: np.ndarray, made: Sequence[Generation]
) -> tuple[float, float, float]:
    """Return mean distances of logprobs in nats, of the tokens behind an update.

    From the engine's to those of the stamped version (mean, largest), and from that version's to
    those of the version before.
    """
    ids = torch.tensor(np.array([[*prompt, *one.token_ids] for one in made]), dtype=torch.long)
    old, new = (_logprobs(folder, ids, len(prompt)) for folder in folders)
    sampled = np.array([one.logprobs for one in made])
    behind = np.array([np.arange(TOKENS) >= one.spans[-1].start for one in made])
    mismatch = np.abs(sampled - new)[behind]
    return float(mismatch.mean()), float(mismatch.max()), float(np.abs(old - new)[behind].mean())


@torch.no_grad()
def _logprobs(folder: Path, ids: torch.Tensor, prompt: int) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(ids).logits[:, prompt - 1 : -1]
    logits[..., model.config.eos_token_id] = -torch.inf  # min_tokens forbids the end
    chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, prompt:, None])
    return chosen[..., 0].numpy()


def _figures(
    mode: str, updates: Sequence[Update], far: Sequence[tuple[float, float, float]]
) -> Iterator[Figure]:
    section = f"weight update while {SAMPLED} requests run, prefix_cache {mode}"
    yield from figures_of(section, updates)
    prefilled = median(update.prefilled for update in updates)
    yield Figure(section, "prefilled again", prefilled, "tokens")
    mismatch, largest, step = (median(column) for column in zip(*far, strict=True))
    yield Figure(section, "mismatch behind the update, mean", mismatch, "nats")
    yield Figure(section, "mismatch behind the update, largest", largest, "nats")
    yield Figure(section, "one version to the next, mean", step, "nats")


if __name__ == "__main__":
    main(float((sys.argv[1:] or ["1e-3"])[0]))
