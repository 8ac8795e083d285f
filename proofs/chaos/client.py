"""One client process of a chaos run: the real parts of the project, over a store that writes down
what it saw.

usage: python -m proofs.chaos.client ROLE NAME URL FOLDER [--regenerate]
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from buffer.errors import Fenced, LedgerError, RoleHeld, RolloutMQError, RunError
from buffer.redis.store import Store
from buffer.run.open import can_wait_for_disk, wait_for_run
from buffer.run.run import Run
from buffer.wire.rollout import FIRST_WEIGHTS
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.config.producing import WorkerSection
from producer_workers.config.task import JudgingSection
from producer_workers.datasets.files import JsonlDataset
from producer_workers.engines.simulated import SimulatedEngine
from producer_workers.follow_owner import follow_owner
from producer_workers.judges.judge import FunctionJudge, Judge
from producer_workers.judges.rq_judge import RqJudge
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from proofs.chaos.history import History, RecordingStore
from proofs.chaos.light_trainer import LightTrainer, stop_on_signal
from proofs.chaos.mutations import MEMORY, MUTATIONS, lend_twice, scripts_of
from proofs.chaos.plan import (
    BY_RQ,
    FENCED,
    INLINE,
    LOST,
    REFUSED,
    RUN,
    SAMPLES,
    Folders,
    by_chance,
    judge_spec,
    mutation,
)
from proofs.truth.witness import Witnessed
from rolloutmq.process_log import log_json
from tests.pipeline.yard import Letters

log = logging.getLogger("rolloutmq.chaos")

TOKENS = 6


class WitnessedEngine(Witnessed, SimulatedEngine):
    """Writes down what it makes, and how many tokens each request had when it ended."""

    def _draw(self, request_id: str, prompt_ids: Any, params: SampleParams) -> Any:
        drawn = super()._draw(request_id, prompt_ids, params)

        def ended(result: asyncio.Future[Any]) -> None:
            is_whole = not result.cancelled() and result.exception() is None
            tokens = len(result.result().token_ids) if is_whole else drawn.tokens_at(self._clock())
            gid = request_id.partition("/")[0]
            self.note("sampled", pid=os.getpid(), gid=gid, tokens=tokens)

        drawn.result.add_done_callback(ended)
        return drawn


def open_run(url: str, history: History) -> Run:
    store = RecordingStore(url, name=f"chaos-{history.who}", deadline_s=60.0)
    store.history = history
    name = mutation()
    if name == MEMORY and history.who == "trainer":
        lend_twice()
    elif name in MUTATIONS:
        store.scripts = scripts_of(name)
    store.waits_for_disk = store.retrying("first contact", lambda: can_wait_for_disk(store))
    return wait_for_run(store, RUN)


def produce(run: Run, folders: Folders) -> None:
    """Be the producer in place of another one. Raises Fenced."""
    samplers = {
        task: Sampler(
            task,
            JsonlDataset(folders.dataset),
            Letters(),
            SampleParams(max_tokens=TOKENS, min_tokens=TOKENS, seed=1),
            prompt_repeat_k=SAMPLES,
            shuffle=False,
        )
        for task in run.limits.tasks
    }
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    Producer(run, samplers, strategies_of(run.limits)).produce_loop(stop, take_over=True)


def judge_url(url: str) -> str:
    """The server of the judges' queue, if it is another one."""
    return os.environ.get("CHAOS_JUDGE_URL", url)


async def work(run: Run, history: History, url: str) -> None:
    engine = WitnessedEngine(
        SimulatedConfig(
            first_token_s=Fixed(value=0.1),
            token_s=Fixed(value=0.08),
            response_tokens=Fixed(value=1),
            vocab_size=90,
        ),
        FIRST_WEIGHTS,
    )
    engine.note = history.note
    judge_store = Store(judge_url(url), name="chaos-judging")
    rq = RqJudge(
        judge_spec(), judge_store, RUN, JudgingSection(kind="rq", timeout_s=10.0, retries=5)
    )
    judges: dict[str, Judge] = {INLINE: FunctionJudge("chance", by_chance), BY_RQ: rq}
    runners = {task: _runner(judges[task]) for task in run.limits.tasks}
    await engine.start()
    limits = WorkerSection(concurrency=16, drain_timeout_s=3.0)
    member = Worker(run, engine, runners, limits, worker_id=history.who)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, member.stop)
    try:
        await member.run()
    finally:
        await engine.shutdown()


def _runner(judge: Judge) -> TaskRunner:
    loop = SingleTurnAgentLoop(
        judge=judge, tokenizer=Letters(), eos_ids={100}, partial_rollout=True
    )
    return TaskRunner(loop, partial_rollout=True, group_time_limit_s=60.0)


def train(run: Run, folders: Folders, history: History, *, regenerate: bool) -> None:
    trainer = LightTrainer(run, folders, history)
    stop_on_signal(trainer)
    trainer.fit(take_over=True, regenerate=regenerate)


def sweep(run: Run) -> None:
    """What `rolloutmq janitor` does."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    run.store.patience = lambda: not stop.is_set()
    while not stop.wait(0.5):
        run.janitor.sweep()
        if run.control.state().mode == "finish":
            return


def judge(url: str) -> None:
    from producer_workers.config.sandbox import BUBBLEWRAP
    from producer_workers.judges.rq_worker import serve_judges

    serve_judges(judge_url(url), RUN, {judge_spec(): BUBBLEWRAP}, 1)


def main(role: str, name: str, url: str, root: str, *flags: str) -> None:
    faulthandler.enable()
    log_json(role, RUN, name)
    follow_owner()
    folders = Folders(Path(root))
    if role == "judge":
        judge(url)
        return
    history = History(folders.history, name)
    history.note("started", pid=os.getpid())
    try:
        run = open_run(url, history)
        act(role, run, folders, history, url, flags)
    except RolloutMQError as error:
        log.warning("%s", error)
        history.note("ended", why=type(error).__name__, said=str(error))
        sys.exit(exit_code(error))
    history.note("ended", why="")


def exit_code(error: RolloutMQError) -> int:
    if isinstance(error, Fenced | RoleHeld | LedgerError):
        return FENCED
    return LOST if isinstance(error, RunError) else REFUSED


def act(
    role: str, run: Run, folders: Folders, history: History, url: str, flags: tuple[str, ...]
) -> None:
    acts: dict[str, Any] = {
        "producer": lambda: produce(run, folders),
        "worker": lambda: asyncio.run(work(run, history, url)),
        "trainer": lambda: train(run, folders, history, regenerate="--regenerate" in flags),
        "janitor": lambda: sweep(run),
    }
    acts[role]()


if __name__ == "__main__":
    main(*sys.argv[1:])
