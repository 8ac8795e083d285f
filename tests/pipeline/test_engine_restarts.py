from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from buffer.errors import ModelError
from buffer.redis.retry import Backoff
from producer_workers.config.engine import VllmConfig
from producer_workers.engines import build_engine, engine_restarts
from producer_workers.engines.base import Engine, EngineDeadError, Generation
from tests.pipeline.yard import FIRST, Yard
from tests.producer_workers.engines.tiny_model import write_tiny_model
from tests.producer_workers.engines.warm_vllm import fork_engines


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_restarts, "BACKOFF", Backoff(0.01, 60.0, jitter=0.0))


class Site:
    """Workers `w0` of a yard, one after another, whose engines each die after some requests."""

    def __init__(self, yard: Yard, *lives: int | None) -> None:
        self.yard = yard
        self.lives = list(lives)
        self.members: list[int] = []

    async def start(self) -> Engine:
        die_after = self.lives.pop(0)
        # what is held is in the engine when it dies
        self.member = self.yard.worker(held=die_after is not None, die_after=die_after)
        engine: Engine = self.member.engine  # type: ignore[attr-defined]
        await engine.start()
        return engine

    async def work(self, engine: Engine, restarts: int) -> None:
        self.members.append(restarts)
        await self.member.run()


async def test_groups_end_on_the_engine_that_replaces_a_dead_one(yard: Yard) -> None:
    yard.enqueue(6, (50, 50))
    site = Site(yard, 7, 0, None)
    serving = asyncio.create_task(engine_restarts.serve(site.start, site.work, 3))
    # a group that waited for its judge when the engine died kept its tokens
    await yard.until(lambda: yard.reissue() >= 0 and yard.stages() == {"completed": 6})
    site.member.stop()
    await serving
    assert site.members == [0, 1, 2]
    assert {record["tries"] for record in yard.records()} <= {"0", "1", "2"}
    assert yard.leases() == 0
    yard.check()


def test_a_worker_gives_up_and_reports_why_when_its_engine_dies_again_and_again(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    yard.enqueue(6, (50, 50))
    site = Site(yard, 0, 0, 0, None)
    with pytest.raises(
        EngineDeadError, match="giving up after 2 restarts of the engine: the simulated engine"
    ):
        asyncio.run(engine_restarts.serve(site.start, site.work, 2))
    assert site.members == [0, 1, 2]
    assert [
        word
        for line in caplog.messages
        if "restart" in line
        for word in line.split()
        if word[:2] == "0."
    ] == ["0.01", "0.02"]
    assert yard.leases() == 0
    assert not yard.run.fleet.workers()


def test_a_restart_that_fails_counts_and_a_first_start_that_fails_ends_it() -> None:
    starts: list[int] = []

    async def fail(*_: object) -> Engine:
        starts.append(1)
        raise ModelError("no such model")

    with pytest.raises(ModelError, match=r"^no such model"):
        asyncio.run(engine_restarts.serve(fail, fail, 3))  # type: ignore[arg-type]
    assert len(starts) == 1
    with pytest.raises(EngineDeadError, match="no such model"):
        asyncio.run(engine_restarts._restart(fail, ModelError("died"), 1, 3))
    assert len(starts) == 3


class WatchedVllm:
    """A real engine that does what a test says when a request of a group comes to it."""

    def __init__(self, engine: Engine, seen: Callable[[str], None]) -> None:
        self._engine = engine
        self._seen = seen

    async def generate(self, request_id: str, *about: Any) -> Generation:
        asyncio.get_running_loop().call_later(0.1, self._seen, request_id.partition("/")[0])
        return await self._engine.generate(request_id, *about)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_prompt_that_kills_vllm_each_time_is_a_dead_letter_and_nothing_beside_it(
    make_yard: Callable[..., Yard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill the engine in the middle of generation; another engine finishes the other groups.

    The first engine is a pair of shards, of which one is killed; the second is one process. The
    third, which nobody kills, is simulated.
    """
    fork_engines(monkeypatch)
    yard = make_yard(max_tries=2)
    poison, *others = yard.enqueue(4, (400, 400))
    model = write_tiny_model(tmp_path / "model", seed=1)
    config = VllmConfig(
        max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=32 << 20, omp_threads=1
    )
    killed: list[int] = []
    sizes = [0, 1, 2]
    victims = "VLLM"
    engines_of_other_tests = psutil.Process().children(recursive=True)

    def kill(gid: str) -> None:
        for child in psutil.Process().children(recursive=True):
            if gid == poison and victims in child.name() and child not in engines_of_other_tests:
                killed.append(child.pid)
                child.kill()

    async def start() -> Engine:
        nonlocal victims
        shards = sizes.pop()
        victims = "VLLM::Worker_TP1" if shards == 2 else "VLLM"
        engine: Engine = yard.worker().engine  # type: ignore[attr-defined]
        if shards:
            sharded = config.model_copy(update={"tensor_parallel_size": shards})
            engine = build_engine(sharded, model, FIRST)
        await engine.start()
        return cast(Engine, WatchedVllm(engine, kill))

    async def work(engine: Engine, _: int) -> None:
        member = yard.worker(engine=engine, concurrency=4)
        ender = asyncio.create_task(yard.until_stages(completed=3, dead=1))
        ender.add_done_callback(lambda _: member.stop())
        try:
            await member.run()
        except EngineDeadError:
            with pytest.raises(EngineDeadError, match="process ended"):
                await engine.load_weights(model, FIRST)
            raise
        finally:
            ender.cancel()

    asyncio.run(engine_restarts.serve(start, work, 2))
    assert len(set(killed)) == 2
    assert {len(yard.group(gid).response_ids) for gid in others} == {800}
    assert "process ended" in str(yard.run.dead_letters.reason(poison))
    assert yard.counters().get("failures_in_row", 0) == 0
    yard.check()
