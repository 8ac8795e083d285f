"""A run on a real server whose workers run in this process, with engines that a test can watch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from buffer.control.control import ControlState, Mode
from buffer.ids import group_id, new_nonce
from buffer.job import PayloadRef
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights import folder_manifest as weights_manifest
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion, RolloutState
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.config.producing import WorkerSection
from producer_workers.config.task import JudgingSection
from producer_workers.engines.base import Generation, GenerationError
from producer_workers.engines.simulated import SimulatedEngine, _Run
from producer_workers.judges.judge import FunctionJudge, judge_call
from producer_workers.judges.watched_judges import WatchedJudges
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from tests.pipeline.judges import by_chance
from tests.waits import DEADLINE_S

TASK = "sums"
LIMITS = RunLimits(
    lease_ms=120_000,
    heartbeat_ms=100,
    worker_timeout_ms=360_000,
    role_timeout_ms=60_000,
    on_straggler="drop",
    tasks={TASK: TaskLimits()},
)
FIRST = FIRST_WEIGHTS
LINEAGE = "l1"

SOME = 9
"""Tokens of a short response, which a held engine makes at once, and a part of a longer one."""


def versions(state: RolloutState) -> list[PolicyVersion]:
    """Return the weights of each token, from its spans, which must cover the response."""
    stamps = [
        PolicyVersion(span.lineage, span.version)
        for span in state.spans
        for _ in range(span.length)
    ]
    assert len(stamps) == len(state.response_ids) == len(state.logprobs)
    return stamps


class Letters:
    """A tokenizer of one character per id."""

    def decode(self, ids: Any, /, **_: Any) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def apply_chat_template(self, messages: Any, /, **_: Any) -> list[int]:
        return [ord(c) % 100 for message in messages for c in message["content"]]


class WatchedEngine(SimulatedEngine):
    """Notes every request: (id, prompt length, what was asked for). `refused`: of these members.

    A held one makes SOME tokens at once, and longer responses only by `make`, until `let_go`. Its
    clock counts tokens, and stands still in a pause, as that of any simulated engine.
    """

    def __init__(
        self, config: SimulatedConfig, version: PolicyVersion, *, held: bool = False
    ) -> None:
        if held:
            one = Fixed(value=1.0)
            config = config.model_copy(update={"first_token_s": one, "token_s": one})
        super().__init__(config, version)
        self.requests: list[tuple[str, int, SampleParams]] = []
        self.refused: set[str] = set()
        self._is_crank = self._is_held = held
        self._made = 0
        self.sampled = 0
        """tokens of requests that have ended, in any way"""

    def _draw(self, request_id: str, prompt_ids: Any, params: SampleParams) -> _Run:
        drawn = super()._draw(request_id, prompt_ids, params)

        def ended(result: asyncio.Future[Generation]) -> None:
            is_whole = not result.cancelled() and result.exception() is None
            is_returned = is_whole and len(result.result().token_ids)
            self.sampled += is_returned or drawn.tokens_at(self._clock()) * (not is_whole)

        drawn.result.add_done_callback(ended)
        return drawn

    async def generate(self, request_id: str, prompt_ids: Any, params: SampleParams) -> Generation:
        self.requests.append((request_id, len(prompt_ids), params))
        if request_id.split("/")[1:2] and request_id.split("/")[1] in self.refused:
            raise GenerationError("refused")
        return await super().generate(request_id, prompt_ids, params)

    def make(self, tokens: int) -> None:
        """Let each request that runs make this many tokens; none in a pause."""
        if self._frozen_s is None:
            self._made += tokens
            self._end_due()

    def let_go(self) -> None:
        """Let all requests end, also those that come, once there is no pause."""
        self._is_held = False
        if self._frozen_s is None:
            self._end_due()

    def _end_due(self) -> None:
        for run in tuple(self._running):
            self._set_timer(run)

    def _clock(self) -> float:
        if self._is_crank and self._frozen_s is None:
            return float(self._made)
        return super()._clock()

    def _set_timer(self, run: _Run) -> None:
        if not self._is_crank:
            super()._set_timer(run)
            return
        tokens = len(run.token_ids)
        if not self._is_held or tokens <= SOME or run.tokens_at(self._clock()) == tokens:
            self._end(run, tokens, run.finish_reason)


class Yard:
    """One run with an open producer and an open trainer.

    `folder` holds the weights that are published.
    """

    def __init__(self, store: Store, name: str, folder: Path, limits: RunLimits = LIMITS) -> None:
        self.store = store
        self.folder = folder
        self.run = Run.create(store, name, new_nonce(), limits, FIRST, "")
        self.producer = new_nonce()
        self.trainer = new_nonce()
        self._working: set[asyncio.Task[None]] = set()
        self._engines: list[WatchedEngine] = []
        self.run.control.open_producer(self.producer)
        self.run.trainers.open(self.trainer, step=0, lineage=LINEAGE)

    # -- moves ---------------------------------------------------------------

    def enqueue(
        self, count: int, tokens: Sequence[int] = (10, 10), extra: dict[str, Any] | None = None
    ) -> list[str]:
        """Enqueue groups whose members generate exactly `tokens` tokens each."""
        cursor = self.run.jobs.cursor(TASK)
        groups = []
        for gid in (group_id(TASK, cursor + i) for i in range(count)):
            states = [
                RolloutState(
                    index=place,
                    messages=[{"role": "user", "content": gid}],
                    prompt_ids=np.arange(3),
                    ground_truth=gid,
                    extra=extra or {},
                    sample_params=SampleParams(max_tokens=length, min_tokens=length, seed=place),
                )
                for place, length in enumerate(tokens)
            ]
            groups.append(states)
        return self.enqueue_states(*groups)

    def enqueue_states(self, *groups: list[RolloutState]) -> list[str]:
        cursor = self.run.jobs.cursor(TASK)
        gids = [group_id(TASK, cursor + i) for i in range(len(groups))]
        data = {
            gid: group_bytes.encode(RolloutGroup(gid, TASK, states))
            for gid, states in zip(gids, groups, strict=True)
        }
        self.run.payloads.write_prompts(data)
        sizes = [len(states) for states in groups]
        done = self.run.jobs.enqueue(self.producer, new_nonce(), TASK, cursor, sizes, 10_000)
        assert done.count == len(groups)
        return gids

    def reissue(self) -> int:
        return self.run.jobs.reissue(self.producer, TASK, "aborted", 10_000)

    def expire_lease(self, worker: str) -> None:
        """Make the last heartbeat of a worker older than a lease, and take back its groups."""
        for key in (self.run.keys.workers, self.run.keys.leases):
            self.store.client.zadd(key, {worker: 1}, xx=True)
        self.run.janitor.sweep()

    def control(self, mode: Mode) -> ControlState:
        return self.run.control.set_mode("operator", mode)

    def write_weights(self, version: int) -> tuple[Path, str]:
        """Write a folder of weights; return it and its checksum."""
        folder = self.folder / f"weights-{version}"
        folder.mkdir()
        save_file({"w": np.full(300, version, dtype=np.float32)}, folder / "model.safetensors")
        return folder, weights_manifest.write(folder, f"{LINEAGE}:{version}")

    def publish(self, version: int) -> PolicyVersion:
        path, checksum = self.write_weights(version)
        return self.name(version, path, checksum)

    def announce(self, version: int) -> ControlState:
        """Write weights that workers may fetch, but not load yet."""
        weights = PolicyVersion(LINEAGE, version)
        path, checksum = self.write_weights(version)
        return self.run.control.publish_weights(
            self.trainer, weights, str(path), checksum, stage="next"
        )

    def located(self, version: int) -> tuple[Path, str]:
        folder = self.folder / f"weights-{version}"
        return folder, weights_manifest.digest((folder / weights_manifest.NAME).read_bytes())

    def name(self, version: int, path: Path, checksum: str) -> PolicyVersion:
        weights = PolicyVersion(LINEAGE, version)
        self.run.control.publish_weights(self.trainer, weights, str(path), checksum)
        return weights

    def worker(
        self,
        name: str = "w0",
        *,
        held: bool = False,
        token_s: float = 0.0,
        judge: Any = by_chance,
        **options: Any,
    ) -> Worker:
        """Return a worker with an engine of its own, if none is given (`worker.engine`).

        `held`: it makes only the tokens that the test lets it make; otherwise it needs `token_s`
        for each.
        """
        engine_options = {
            key: options.pop(key) for key in ("die_after", "max_num_seqs") if key in options
        }
        config = SimulatedConfig(
            first_token_s=Fixed(value=0.0),
            token_s=Fixed(value=token_s),
            response_tokens=Fixed(value=1),
            vocab_size=100,
            **engine_options,
        )
        engine = options.pop("engine", None) or WatchedEngine(config, FIRST, held=held)
        is_partial = options.pop("partial_rollout", False)
        grace_s = options.pop("grace_s", 10.0)
        judges = options.pop("judges", None) or WatchedJudges()
        judge = judge if hasattr(judge, "name") else FunctionJudge("test", judge)
        chosen = {
            key: options.pop(key)
            for key in (
                "is_valid_sample", "group_time_limit_s", "on_failed_member", "train_roles",
                "column_judges",
            )
            if key in options
        }  # fmt: skip
        if function := chosen.get("is_valid_sample"):
            what = "is_valid_sample_fn 'test'"
            call = judge_call(what, what, function, "filter", JudgingSection())
            chosen["is_valid_sample"] = judges.watch_filter(what, call, grace_s)
        loop = options.pop("loop", SingleTurnAgentLoop)(
            judge=judges.watch(judge, grace_s),
            tokenizer=Letters(),
            eos_ids={100},
            partial_rollout=is_partial,
        )
        tasks = {TASK: TaskRunner(loop, is_partial, **chosen, judges=judges)}
        weights_url = options.pop("weights_url", None)
        limits = WorkerSection(**{"concurrency": 4, **options})
        worker = Worker(self.run, engine, tasks, limits, worker_id=name, weights_url=weights_url)
        worker.engine = engine  # type: ignore[attr-defined]
        return worker

    @asynccontextmanager
    async def working(self, worker: Worker) -> AsyncIterator[WatchedEngine]:
        """Run `worker`, and stop it in order at the end.

        Raise what ended it, unless the test has failed.
        """
        engine: WatchedEngine = worker.engine  # type: ignore[attr-defined]
        self._engines.append(engine)  # a real one does not count
        await engine.start()
        task = asyncio.create_task(worker.run())
        self._working.add(task)
        try:
            yield engine
        except BaseException as error:
            worker.stop()
            (end,) = await asyncio.gather(task, return_exceptions=True)
            error.add_note(f"the worker ended with {end!r}")
            raise
        finally:
            self._working.discard(task)
        worker.stop()
        await task
        if not self._working and all(isinstance(each, WatchedEngine) for each in self._engines):
            self.check_tokens()

    # -- sights --------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        return {
            name: int(float(value))
            for name, value in self.run.progress(TASK).items()
            if value.isdigit()
        }

    def leases(self) -> int:
        return self.run.account.totals().leases

    def stages(self) -> dict[str, int]:
        """Where groups are; only places that are not empty."""
        return {place: n for place, n in self.run.account.totals().tasks[0].stages.items() if n}

    def group(self, gid: str) -> RolloutGroup:
        record = self.run.record(gid)
        ref = PayloadRef(
            gid,
            record["payload"],
            int(record["chunks"]),
            int(record["size"]),
            record.get("crc", ""),
        )
        return self.run.buffer.read(ref)

    def records(self) -> list[dict[str, str]]:
        return [self.run.record(group_id(TASK, draw)) for draw in range(self.run.jobs.cursor(TASK))]

    def check_tokens(self) -> None:
        """The account has every token that the engines sampled, once all workers have left."""
        account = self.run.account.tokens()[TASK]
        assert account.reported == 0, account
        assert account.total == sum(engine.sampled for engine in self._engines), account

    def check(self) -> None:
        audit = self.run.account.fsck()
        assert audit.clean, (audit.faults, audit.lost, audit.doubled)

    # -- waiting -------------------------------------------------------------

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something is so. Fail when a worker that works ends with an error before."""
        end = time.monotonic() + DEADLINE_S
        while not await asyncio.to_thread(condition):
            if (errors := self._errors()) and not await asyncio.to_thread(condition):
                raise AssertionError(f"never came; groups are {self.stages()}") from errors[0]
            assert time.monotonic() < end, f"never came; groups are {self.stages()}"
            await asyncio.sleep(0.01)

    def _errors(self) -> list[BaseException]:
        ended = [task for task in self._working if task.done() and not task.cancelled()]
        return [error for error in (task.exception() for task in ended) if error]

    async def until_engine(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so of an engine, whose loop must not run while one looks."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_stages(self, **stages: int) -> None:
        await self.until(lambda: self.stages() == stages)

    async def until_renewed(self) -> None:
        """Wait until five heartbeats have moved the deadline of the only worker with leases."""
        wanted = self._lease_end() + 5 * self.run.limits.heartbeat_ms
        await self.until(lambda: self._lease_end() >= wanted)

    def _lease_end(self) -> float:
        ((_, deadline),) = self.store.client.zrange(self.run.keys.leases, 0, -1, withscores=True)
        return float(deadline)

    async def until_idle(self) -> None:
        """Wait until the only worker has sent five heartbeats: it has done what it does by itself."""
        seen = set[int]()

        def beats() -> int:
            seen.update(worker.seen_ms for worker in self.run.fleet.workers())
            return len(seen)

        await self.until(lambda: beats() > 5)

    async def receipts(self, state: ControlState) -> None:
        """Wait until every live worker has carried out a control state."""
        await asyncio.to_thread(self.run.receipts.wait, state, timeout_s=DEADLINE_S)

    async def until_generating(self, engine: WatchedEngine, requests: int) -> None:
        await self.until_engine(lambda: engine.unfinished() == requests)
        engine.make(SOME)
