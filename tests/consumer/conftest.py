"""A fresh run on Valkey (`on_both`: on Redis too), and the trainer's handle on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from consumer.handle import taker
from consumer.handle.rollout_consumer import RolloutConsumer
from tests.servers import Server

LIMITS = RunLimits(
    lease_ms=60_000,
    heartbeat_ms=100,
    worker_timeout_ms=180_000,
    role_timeout_ms=60_000,
    stale_threshold=1000,
    steps=5,
    batch_size=3,
    tasks={
        "math": TaskLimits(),
        "quiz": TaskLimits(eval_of="math"),
        "exam": TaskLimits(eval_of="math"),
    },
)

Trainers = Callable[..., RolloutConsumer]


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, server_of: Callable[[str], Server]) -> Server:
    """Scripts are compared on both servers in tests/buffer."""
    return server_of(getattr(request, "param", "valkey"))


@pytest.fixture(autouse=True)
def quick_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a waiting take notice a stop, or another trainer, soon."""
    monkeypatch.setattr(taker, "POLL_S", 0.2)


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    store = Store(server.url, deadline_s=400.0)
    yield store
    store.close()


@pytest.fixture
def make_run(store: Store, run_name: str) -> Callable[..., Run]:
    """Create the run of this test, with other limits: `make_run(lease_ms=1000)`."""
    nonce = new_nonce()

    def make(**changes: object) -> Run:
        limits = RunLimits(**{**LIMITS.model_dump(), **changes})
        return Run.create(store, run_name, nonce, limits, PolicyVersion("initial", 0), "/weights/0")

    return make


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    return make_run()


@pytest.fixture
def trainer() -> Iterator[Trainers]:
    """Open trainers with `trainer(run, step=3)`; what is open at the end is closed."""
    opened: list[RolloutConsumer] = []

    def open_trainer(run: Run, step: int = 0, **options: object) -> RolloutConsumer:
        consumer = RolloutConsumer(run)
        consumer.open(step, **options)  # type: ignore[arg-type]
        opened.append(consumer)
        return consumer

    yield open_trainer
    for consumer in opened:
        die(consumer)


def die(consumer: RolloutConsumer) -> None:
    """Stop a trainer's heartbeat as a crash would: without a word to the server."""
    consumer.role.ended.set()
    # in a crash it would be gone, and not read on while the store is closed
    consumer._prefetcher.close()
    if consumer.role.thread:
        consumer.role.thread.join()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.consumer.grpo.models.tiny import build_model  # needs torch

    return build_model(tmp_path_factory.mktemp("models"))
