"""Share one event loop, tiny models, one vLLM engine and one vLLM server."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from buffer.wire.rollout import PolicyVersion
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import HttpConfig, SimulatedConfig, VllmConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine
from tests.producer_workers.engines.tiny_adapter import write_adapter
from tests.producer_workers.engines.tiny_model import write_tiny_model
from tests.producer_workers.engines.vllm_server import vllm_server
from tests.producer_workers.engines.warm_vllm import fork_engines

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]
FIRST = PolicyVersion("main", 0)
CPU_ENGINE = VllmConfig(
    max_model_len=2048,
    max_num_seqs=32,
    kv_cache_memory_bytes=64 << 20,
    omp_threads=1,
    report_load=True,
    prefix_cache="clear",  # exact, as the other engines are; test_vllm_updates.py tests both
    # benchmarks/gpu_day runs these tests twice: first with the scheduling that a CPU has
    extra_args={"async_scheduling": False} if "SYNCHRONOUS_SCHEDULING" in os.environ else {},
)


@dataclass(frozen=True)
class Folders:
    """Checkpoints of one model, and things that are none."""

    first: Path
    second: Path
    truncated: Path
    wider: Path


@pytest.fixture(scope="session", autouse=True)
def forked_engines() -> Iterator[None]:
    """Only the engine in a process of its own starts as a worker's does: test_vllm_processes.py."""
    with pytest.MonkeyPatch.context() as patched:
        fork_engines(patched)
        yield


@pytest.fixture(scope="session")
def run() -> Iterator[Run[Any]]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    first = write_tiny_model(root / "first", seed=1)
    truncated = root / "truncated"
    shutil.copytree(first, truncated)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return Folders(
        first=first,
        second=write_tiny_model(root / "second", seed=2),
        truncated=truncated,
        wider=write_tiny_model(root / "wider", seed=1, hidden=128),
    )


@pytest.fixture(scope="session")
def adapters(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two for the first model; the model that each makes of it lies in its "merged"."""
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(seed), folders.first, seed) for seed in (1, 2)]


@pytest.fixture(scope="session")
def running_vllm(run: Run[None], folders: Folders) -> Iterator[Engine]:
    """Start the one vLLM engine that most tests share."""
    with running(CPU_ENGINE, run, folders.first) as engine:
        yield engine


@contextmanager
def running(config: VllmConfig, run: Run[None], model: Path) -> Iterator[Engine]:
    """Start an engine of its own, whose end must leave no process behind."""
    before = set(psutil.Process().children(recursive=True))
    engine = build_engine(config, model, FIRST)
    run(engine.start())
    yield engine
    run(engine.shutdown())
    left = [
        child for child in set(psutil.Process().children(recursive=True)) - before if is_vllm(child)
    ]
    deadline = time.monotonic() + 400.0
    while any(is_vllm(child) for child in left):  # one that is killed is still there for a moment
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def is_vllm(process: psutil.Process) -> bool:
    """Return whether a process is a living one of vLLM's.

    A zombie has ended: its parent has not collected its exit code yet.
    """
    try:
        return (
            process.is_running()
            and process.status() != psutil.STATUS_ZOMBIE
            and "VLLM" in process.name()
        )
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def vllm_engine(running_vllm: Engine, run: Run[None], folders: Folders) -> Iterator[Engine]:
    """Return the vLLM engine in its first state."""
    yield running_vllm
    run(running_vllm.resume())
    run(running_vllm.load_weights(folders.first, FIRST))


@pytest.fixture
def simulated_engine(run: Run[None]) -> Iterator[Engine]:
    config = SimulatedConfig(
        first_token_s=Fixed(value=0.005), token_s=Fixed(value=0.002), max_num_seqs=32
    )
    engine = build_engine(config, Path(), FIRST)
    run(engine.start())
    yield engine
    run(engine.shutdown())


@pytest.fixture(scope="session")
def server_url(folders: Folders) -> Iterator[str]:
    """Start a real `vllm serve` on loopback."""
    with vllm_server(folders.first) as url:
        yield url


@pytest.fixture(scope="session")
def running_http(run: Run[None], folders: Folders, server_url: str) -> Iterator[Engine]:
    engine = build_engine(HttpConfig(url=server_url), folders.first, FIRST)
    run(engine.start())
    yield engine
    run(engine.shutdown())


@pytest.fixture
def http_engine(running_http: Engine, run: Run[None], folders: Folders) -> Iterator[Engine]:
    yield running_http
    run(running_http.resume())
    run(running_http.load_weights(folders.first, FIRST))
