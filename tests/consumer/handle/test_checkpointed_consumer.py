from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import orjson
import pytest

from buffer.control.control import Mode
from buffer.errors import ConfigError, LedgerError, RoleHeld
from buffer.ids import new_nonce
from buffer.redis.store import Store
from buffer.run.run import Run
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.checkpointed_consumer import CheckpointedConsumer
from tests.consumer.conftest import LIMITS
from tests.consumer.handle.crew import at_work
from tests.consumer.handle.killed_loop import TRAINED, Model, main
from tests.servers import Server
from tests.waits import until
from tests.warm_process import start_program

STEPS = 3
GROUPS = 2


@pytest.fixture
def make(store: Store) -> Callable[[str], Run]:
    limits = LIMITS.model_copy(update={"steps": STEPS, "batch_size": GROUPS})
    return lambda name: Run.create(store, name, new_nonce(), limits)


@pytest.fixture
def short(make: Callable[[str], Run], run_name: str) -> Run:
    return make(run_name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_any_line_it_trains_every_group_once(
    make: Callable[[str], Run], server: Server, run_name: str, tmp_path: Path
) -> None:
    for at in count(1):
        run, folder = make(f"{run_name}-{at}"), tmp_path / str(at)
        folder.mkdir()
        with at_work(run, math=STEPS * GROUPS + 1):
            codes = []
            for line in (at, 0):
                life = start_program(main, server.url, run.name, folder, line)
                life.join()
                codes.append(life.exitcode)
        assert codes[0] in (0, -signal.SIGKILL), codes
        assert codes[1] == 0, f"killed before line {at}, it does not continue"
        check(run, folder)
        if codes[0] == 0:
            assert at > 90
            return


def check(run: Run, folder: Path) -> None:
    """Each group is once in the weights; what came again was the same; the run is finished."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    newest = checkpoints.path(STEPS)
    trained = orjson.loads((newest / TRAINED).read_bytes())
    assert [step for step, *_ in trained] == [s for s in range(1, STEPS + 1) for _ in range(GROUPS)]
    assert len({gid for _, gid, _ in trained}) == STEPS * GROUPS
    for step in range(1, STEPS + 1):
        first = [line for line in trained if line[0] == step]
        for delivery in folder.glob(f"{step}-*"):
            assert orjson.loads(delivery.read_bytes()) == first
    assert run.ledger.steps()[:2] == (STEPS, STEPS)
    state = run.control.state()
    assert state.weights.version == STEPS
    assert state.mode is Mode.FINISH
    published = folder / "weights" / f"{state.weights.lineage}-{STEPS:06d}" / "model.safetensors"
    assert published.read_bytes() == (newest / "model.safetensors").read_bytes()
    # what a killed process was writing is gone
    assert list((folder / "checkpoints").glob(".*")) == []
    assert list((folder / "weights").glob(".*")) == []
    assert run.account.fsck().clean


def left_by_break(consumer: CheckpointedConsumer, model: Model, folder: Path) -> None:
    for batch in consumer.steps(model.save, save_state=model.save_state):
        model.train(batch, folder)
        break


def left_by_return(consumer: CheckpointedConsumer, model: Model, folder: Path) -> None:
    for batch in consumer.steps(model.save, save_state=model.save_state):
        model.train(batch, folder)
        return


def left_by_error(consumer: CheckpointedConsumer, model: Model, folder: Path) -> None:
    for batch in consumer.steps(model.save, save_state=model.save_state):
        model.train(batch, folder)
        raise ZeroDivisionError


def left_by_close(consumer: CheckpointedConsumer, model: Model, folder: Path) -> None:
    batches = consumer.steps(model.save, save_state=model.save_state)
    assert isinstance(batches, Iterator)
    model.train(next(batches), folder)
    batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("leave", [left_by_break, left_by_return, left_by_error, left_by_close])
def test_a_step_that_is_left_comes_again(
    short: Run, tmp_path: Path, leave: Callable[[CheckpointedConsumer, Model, Path], None]
) -> None:
    with at_work(short, math=STEPS * GROUPS):
        try:
            with CheckpointedConsumer(short, tmp_path) as consumer:
                leave(consumer, Model(consumer.checkpoint), tmp_path)
                with pytest.raises(LedgerError, match="left in step 1"):
                    next(consumer.steps(Model(None).save))
        except ZeroDivisionError:
            assert leave is left_by_error
        assert not short.control.holder("trainer").is_alive
        assert short.control.state().mode is Mode.RUN
        with CheckpointedConsumer(short, tmp_path) as consumer:
            assert consumer.checkpoint is None
            model = Model(None)
            for batch in consumer.steps(model.save, save_state=model.save_state):
                model.train(batch, tmp_path)
    check(short, tmp_path)


def test_a_stop_ends_the_loop_with_the_step_in_a_checkpoint(short: Run, tmp_path: Path) -> None:
    with at_work(short, math=STEPS * GROUPS):
        with CheckpointedConsumer(short, tmp_path) as consumer:
            model = Model(None)
            steps = consumer.steps(model.save, save_state=model.save_state, checkpoint_every=2)
            for batch in steps:
                model.train(batch, tmp_path)
                consumer.stop()
        assert short.ledger.steps()[:2] == (1, 1)
        assert short.control.state().mode is Mode.RUN
        with CheckpointedConsumer(short, tmp_path) as consumer:
            model = Model(consumer.checkpoint)
            for batch in consumer.steps(model.save, save_state=model.save_state):
                model.train(batch, tmp_path)
            assert len(consumer.evaluate("quiz", 2)) == 2  # by the weights of the last step
    check(short, tmp_path)


def test_a_stop_ends_a_wait(short: Run, tmp_path: Path) -> None:
    with at_work(short, math=1), CheckpointedConsumer(short, tmp_path) as consumer:
        save = Model(None).save
        assert list(consumer.steps(save, waiting=lambda _: consumer.stop())) == []
    assert not short.control.holder("trainer").is_alive
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == []


def test_a_full_memory_is_freed_by_a_checkpoint_before_it_is_due(
    store: Store, run_name: str, tmp_path: Path
) -> None:
    small = {"steps": 10, "batch_size": 2, "low_bytes": 3000, "high_bytes": 9000}
    run = Run.create(store, run_name, new_nonce(), LIMITS.model_copy(update=small))
    with at_work(run, math=20), CheckpointedConsumer(run, tmp_path) as consumer:
        model, early = Model(None), set[int]()
        for batch in consumer.steps(model.save, save_state=model.save_state, checkpoint_every=10):
            model.train(batch, tmp_path)
            early.update(CheckpointFolder(tmp_path / "checkpoints").steps())
    assert early
    assert len({gid for _, gid, _ in model.trained}) == len(model.trained) == 20


def test_only_one_process_has_the_loop(
    short: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = CheckpointedConsumer(short, tmp_path)
    with CheckpointedConsumer(short, tmp_path), pytest.raises(RoleHeld), second:
        pass
    until(lambda: not short.control.holder("trainer").is_alive, "the role is given up")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 ranks"):
        CheckpointedConsumer(short, tmp_path)
