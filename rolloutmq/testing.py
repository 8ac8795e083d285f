"""Test an agent loop and a judge in a whole run in one process, without server, model or GPU.

Producer, worker, scripts and wire format are the real ones; the server is in memory (extra
`testing`), and the engine makes random tokens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from buffer.errors import RolloutMQError
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS
from buffer.wire.sampling import SampleParams
from consumer.handle.rollout_consumer import RolloutConsumer
from producer_workers.agent_loops.agent_loop import AgentLoopFactory, load_agent_loop
from producer_workers.agent_loops.tokenizer import Tokenizer
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.config.producing import WorkerSection
from producer_workers.datasets.records import RecordsDataset, problem_of
from producer_workers.engines.base import Engine
from producer_workers.engines.simulated import SimulatedEngine
from producer_workers.judges.judge import FunctionJudge
from producer_workers.judges.load import load_judge
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker

TASK = "rehearsal"
POLL_S = 0.02  # between two looks for a group that failed


class RehearsalError(RolloutMQError):
    """Raised when a group failed or was not ready in time; says which one, and why."""


END = 0  # the token that ends a turn; it is also the space


class Characters:
    """A tokenizer: ids 0 to 94 are the ASCII characters from the space on; a space ends a turn."""

    def apply_chat_template(self, conversation: Any, /, **_: Any) -> list[int]:
        return [
            token
            for message in conversation
            for token in [*self.encode(str(message["content"])), END]
        ]

    def decode(self, token_ids: Any, /, **_: Any) -> str:
        return "".join(chr(32 + token) for token in token_ids)

    def encode(self, text: str, /, **_: Any) -> list[int]:
        return [(ord(character) - 32) % 95 for character in text]


def rehearse(
    problems: Sequence[Mapping[str, Any]],
    *,
    judge: str | Callable[..., Any],
    agent_loop: str | AgentLoopFactory = "single_turn",
    agent_loop_options: Mapping[str, Any] | None = None,
    samples: int = 2,
    tokenizer: Tokenizer | None = None,
    engine: Engine | None = None,
    timeout_s: float = 60.0,
) -> list[RolloutGroup]:
    """Return one batch, as a trainer gets it: a group of `samples` rollouts per problem, in order.

    `problems` have the fields of a JSONL data set. `judge` and `agent_loop` are objects or their
    names in a config; `agent_loop_options` are further arguments of the loop. Without a
    `tokenizer`, a token is a character; your own `engine` decides what is generated. Must not be
    called from a running event loop. Raises RehearsalError, DatasetError and ConfigError.
    """
    tokenizer = tokenizer or Characters()
    quick = Fixed(value=0.0)
    config = SimulatedConfig(
        response_tokens=Fixed(value=32),
        first_token_s=quick,
        token_s=quick,
        vocab_size=95,
        eos_token_id=END,
    )
    engine = engine or SimulatedEngine(config, FIRST_WEIGHTS)
    name = getattr(judge, "__name__", "judge")
    scores = load_judge(judge) if isinstance(judge, str) else FunctionJudge(name, judge)
    loop = load_agent_loop(
        agent_loop, judge=scores, tokenizer=tokenizer, eos_ids={END}, options=agent_loop_options
    )
    limits = RunLimits(
        max_tries=1, steps=1, batch_size=len(problems), tasks={TASK: TaskLimits(strategy="sync")}
    )
    with closing(Store("memory://rehearsal", name=TASK)) as store:
        run = Run.create(store, f"{TASK}-{new_nonce()}", new_nonce(), limits)
        # by index: iterating over a map-style torch data set may not end
        dataset = RecordsDataset(
            [problems[row] for row in range(len(problems))], "problems", problem_of
        )
        sampler = Sampler(
            TASK, dataset, tokenizer, SampleParams(seed=0), prompt_repeat_k=samples, shuffle=False
        )
        producer = Producer(run, {TASK: sampler}, strategies_of(run.limits))
        section = WorkerSection(drain_timeout_s=1.0)
        worker = Worker(run, engine, {TASK: TaskRunner(loop)}, section, worker_id="w0")
        try:
            return asyncio.run(_play(run, producer, worker, engine, len(dataset), timeout_s))
        finally:
            # many failing rehearsals in one process must not fill its memory
            for key in list(store.client.scan_iter(f"{run.keys.prefix}*")):
                store.client.unlink(key)


async def _play(
    run: Run, producer: Producer, worker: Worker, engine: Engine, count: int, timeout_s: float
) -> list[RolloutGroup]:
    """Run producer, worker and trainer until step 1 is taken and committed; return its groups."""
    consumer = RolloutConsumer(run, prefetch_bytes=0)
    consumer.open()
    await engine.start()
    stop = threading.Event()
    take = partial(consumer.take_batch, 1, {TASK: count}, deadline_s=timeout_s)
    working = asyncio.create_task(worker.run())
    producing = asyncio.create_task(asyncio.to_thread(producer.produce_loop, stop))
    taking = asyncio.create_task(asyncio.to_thread(take))
    parts = (working, producing, taking)
    try:
        while not any(part.done() for part in parts):
            _raise_if_incomplete(run)
            await asyncio.wait(parts, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        for part in parts:
            if part.done():
                part.result()
        batch = await taking
        _raise_if_incomplete(run)
        consumer.commit(1, keep=1)
        return sorted(batch.groups, key=lambda group: group.gid)
    except TimeoutError as error:
        stages = {stage: n for stage, n in run.account.totals().tasks[0].stages.items() if n}
        raise RehearsalError(
            f"not ready after {timeout_s:g} s; groups by stage: {stages}"
        ) from error
    finally:
        consumer.stop()
        consumer.finish()
        stop.set()
        worker.stop()
        await asyncio.gather(*parts, return_exceptions=True)
        consumer.close()
        await engine.shutdown()


def _raise_if_incomplete(run: Run) -> None:
    """Raise RehearsalError, with the reason, if the batch can never be complete."""
    for letter in run.dead_letters.newest():
        raise RehearsalError(
            f"{letter.gid}: {letter.reason}", hint="the agent loop or the judge failed this group"
        )
    for skipped in run.skips.newest():
        raise RehearsalError(f"{skipped.gid} was skipped: {skipped.reason}")
    stop = run.task_stops.of(TASK)
    if stop.is_stopped:
        raise RehearsalError(f"a problem cannot be used: {stop.reason}")
    stages = run.account.totals().tasks[0].stages
    if passed_over := stages["dropped"]:
        raise RehearsalError(
            f"{passed_over} problems were passed over: their prompts are too large to be stored",
            hint="the log of rolloutmq.producer names their rows",
        )
