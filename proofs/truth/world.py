"""A run on a real server: its producer and its workers, in threads, with engines that record what they make."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from buffer.control.control import Mode
from buffer.ids import new_nonce
from buffer.job import PayloadRef
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.payloads import checksum
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights import folder_manifest
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS
from buffer.wire.sampling import SampleParams
from consumer.handle.rollout_consumer import RolloutConsumer
from producer_workers.agent_loops.multi_turn import MultiTurnAgentLoop
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.producing import WorkerSection
from producer_workers.judges.judge import FunctionJudge
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from proofs.chaos.history import History, read_history
from proofs.truth.case import Case
from proofs.truth.engine import EOS, Script, WitnessedEngine
from proofs.truth.oracle import Oracle, Verdict
from proofs.truth.words import Asker, Rows, Words, score
from tests.buffer.cutting_proxy import CuttingProxy
from tests.servers import raw_client

TASK, EXAM = "sums", "exam"
DEADLINE_S = 400.0
LOOK_S = 0.02


class World:
    """One case at work on the server at `url`. Usable within `at_work`."""

    def __init__(self, case: Case, url: str, name: str, folder: Path) -> None:
        self.case = case
        self.url = url
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.history = History(folder / "history", name)
        self._words = Words(case.prompt)
        self.store = Store(url, deadline_s=DEADLINE_S)
        self.run = Run.create(self.store, name, new_nonce(), _limits(case), FIRST_WEIGHTS, "")
        held = (
            frozenset(range(case.members - 1, case.members)) if case.interruptions else frozenset()
        )
        script = Script(
            *case.request_tokens,
            interruptions=case.interruptions,
            held=held,
            spared=frozenset({EXAM}),
            seed=case.seed,
        )
        self.engines = [WitnessedEngine(f"{name}-{n}", script) for n in range(case.workers)]
        self.proxies: list[CuttingProxy] = []
        self._stop = threading.Event()
        self._errors: list[BaseException] = []

    # -- parts ---------------------------------------------------------------

    @contextmanager
    def at_work(self) -> Iterator[World]:
        """Produce and generate within the block. Raises what ended a part."""
        with ExitStack() as stack:
            stack.callback(self.store.close)
            stores = [stack.enter_context(self._network(n)) for n in range(self.case.workers)]
            work = partial(asyncio.run, self._work(stores))
            threads = [
                threading.Thread(target=self._kept, args=(part,), daemon=True)
                for part in (self._produce, work, self._release)
            ]
            for thread in threads:
                thread.start()
            try:
                yield self
            finally:
                self._stop.set()
                for thread in threads:
                    thread.join()
        if self._errors:
            raise self._errors[0]

    def check(self) -> None:
        """Raise what has ended a part."""
        if self._errors:
            raise self._errors[0]

    def _kept(self, part: Callable[[], object]) -> None:
        try:
            part()
        except BaseException as error:
            self._errors.append(error)

    @contextmanager
    def _network(self, number: int) -> Iterator[Store]:
        """The store of a worker, behind a relay that cuts replies where the case says so."""
        if not self.case.cuts:
            yield Store(self.url, deadline_s=DEADLINE_S)
            return
        path = self.folder / f"cut-{number}.sock"
        upstream = self.url.removeprefix("unix://")
        proxy = CuttingProxy(upstream, path, every_bytes=self.case.trip_bytes)
        self.proxies.append(proxy)
        yield Store(proxy.url, deadline_s=DEADLINE_S)
        proxy.close()

    def _produce(self) -> None:
        params = SampleParams(max_tokens=1 << 28)
        samplers = {
            task: Sampler(
                task, Rows(), self._words, params, prompt_repeat_k=self.case.members, shuffle=False
            )
            for task in (TASK, EXAM)
        }
        store = Store(self.url, deadline_s=DEADLINE_S)
        run = Run.open(store, self.run.name)
        manager = Producer(run, samplers, strategies_of(run.limits))
        manager.produce_loop(self._stop)
        store.close()

    async def _work(self, stores: list[Store]) -> None:
        workers = []
        for number, (engine, store) in enumerate(zip(self.engines, stores, strict=True)):
            engine.note = self.history.note
            run = Run.open(store, self.run.name)
            runners = {
                task: TaskRunner(self._loop(), partial_rollout=True) for task in (TASK, EXAM)
            }
            name = f"w{number}"
            limits = WorkerSection(concurrency=self.case.concurrency, drain_timeout_s=0.0)
            workers.append(Worker(run, engine, runners, limits, worker_id=name))
        running = [asyncio.create_task(worker.run()) for worker in workers]
        while not self._stop.is_set() and not any(task.done() for task in running):
            await asyncio.sleep(LOOK_S)
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
        for store in stores:
            store.close()

    def _loop(self) -> SingleTurnAgentLoop:
        make: Callable[..., SingleTurnAgentLoop] = SingleTurnAgentLoop
        if self.case.turns > 1:
            make = partial(MultiTurnAgentLoop, environment=Asker(self.case.turns))
        judge = FunctionJudge("truth", score)
        return make(judge=judge, tokenizer=self._words, eos_ids={EOS}, partial_rollout=True)

    def _release(self) -> None:
        """Interrupt all engines whenever every group that runs waits for that."""
        while not self._stop.wait(LOOK_S):
            held = {
                request.partition("/")[0] for engine in self.engines for request in [*engine.held]
            }
            running = sum(task.running for task in self.run.account.totals().tasks)
            if held and running == len(held):
                self._set(Mode.ABORT)
                self.until(lambda: not any(engine.held for engine in self.engines))
                self._set(Mode.RUN)

    def _set(self, mode: Mode) -> None:
        self.run.control.set_mode("operator", mode)

    # -- moves and sights ----------------------------------------------------

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until something is so, or the world ends."""
        end = time.monotonic() + DEADLINE_S
        while not condition() and not self._stop.is_set():
            self.check()
            assert time.monotonic() < end, f"never came; {self.run.account.totals().tasks}"
            time.sleep(LOOK_S)

    def stored(self) -> list[RolloutGroup]:
        """Every group of the completed pool, decoded from memory that nothing else uses.

        Its checksum is that of the record.
        """
        groups = []
        with raw_client(self.url) as client:
            for entry in self.run.buffer.peek(self.case.batch, TASK):
                ref: PayloadRef = entry.payload
                names = self.run.keys.payload_chunks(ref.gid, ref.token, ref.chunks)
                data = b"".join(bytes(part) for part in client.mget(names))
                assert checksum(data) == ref.crc, ref.gid
                groups.append(group_bytes.decode(data))
        return groups

    def judge(self) -> Verdict:
        """Compare what was used with what was made."""
        events = read_history(self.folder / "history")
        return Oracle(events, self._words.prompt_of).judge()


def publish(consumer: RolloutConsumer, folder: Path, step: int) -> None:
    """Name new weights around a pause."""
    name = f"{consumer.lineage}:{step}"
    path = folder / name.replace(":", "-")
    path.mkdir()
    save_file({"w": np.full(8, step, dtype=np.float32)}, path / "model.safetensors")
    checksum_of_folder = folder_manifest.write(path, name)
    with consumer.paused("keep" if step % 2 else "abort"):
        consumer.publish_weights(step, str(path), checksum_of_folder)


def _limits(case: Case) -> RunLimits:
    """A run whose groups never become too old."""
    return RunLimits(
        lease_ms=120_000,
        heartbeat_ms=200,
        worker_timeout_ms=360_000,
        role_timeout_ms=60_000,
        steps=case.steps,
        batch_size=case.batch,
        # some batches ahead of the newest weights, which are those before the batches that are held
        stale_threshold=2 + case.held,
        on_straggler="retry",
        tasks={TASK: TaskLimits(), EXAM: TaskLimits(eval_of=TASK)},
    )
