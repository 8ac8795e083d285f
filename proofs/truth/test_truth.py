"""What is trained is what was sampled: small forms of `python -m proofs.truth`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from producer_workers.worker import worker
from proofs.truth.case import Case
from proofs.truth.loss_witness import LossWitness
from proofs.truth.trainer import train, train_in_turns
from proofs.truth.world import TASK, World
from tests.consumer.grpo.models.tiny import build_model
from tests.servers import Server

MakeWorld = Callable[[Case], World]


@pytest.fixture(scope="session")
def server(server_of: Callable[[str], Server]) -> Server:
    return server_of("valkey")


@pytest.fixture(autouse=True)
def quick_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop ends only after its threads."""
    monkeypatch.setattr(worker, "IDLE_S", 0.2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture
def make_world(server: Server, run_name: str, tmp_path: Path) -> MakeWorld:
    made: list[World] = []

    def make(case: Case) -> World:
        name = f"{run_name}-{len(made)}"
        made.append(World(case, server.url, name, tmp_path / name))
        return made[-1]

    return make


SMALL = {
    "held-and-delivered-again": Case(held=1, evaluates=2, restart_after=1),
    "async-with-resumed-turns-and-cut-replies": Case(
        is_async=True, turns=2, interruptions=1, workers=2, cuts=True
    ),
    "two-ranks": Case(steps=2, batch=24, ranks=2, updates=2),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_loss_gets_what_the_engine_made(
    name: str, make_world: MakeWorld, model_dir: Path
) -> None:
    world = make_world(SMALL[name])
    with world.at_work():
        train(world, model_dir)
    verdict = world.judge()
    assert not verdict.faults, str(verdict)


def test_two_consumers_that_read_ahead_keep_apart(make_world: MakeWorld, model_dir: Path) -> None:
    case = Case(steps=2, prefetch_bytes=64 << 20)
    with ExitStack() as stack:
        worlds = [stack.enter_context(make_world(case).at_work()) for _ in range(2)]
        train_in_turns(worlds, model_dir)
    for world in worlds:
        assert not world.judge().faults, str(world.judge())


def test_workers_store_what_their_engines_made(make_world: MakeWorld, model_dir: Path) -> None:
    """Groups of 1.3 to 2 MB that are resumed together, twice; a checksum proves nothing of them."""
    case = Case(steps=1, batch=12, group_bytes=(1_500_000, 1_500_000), interruptions=2, cuts=True)
    world = make_world(case)
    with world.at_work():
        world.until(lambda: world.run.buffer.count(TASK) == case.batch)
        LossWitness(model_dir, world.history.note).look(1, world.stored())
    verdict = world.judge()
    assert not verdict.faults, str(verdict)
    assert verdict.groups == case.batch
    assert sum(proxy.dropped for proxy in world.proxies) > 0
