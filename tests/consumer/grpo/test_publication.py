from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import PublicationFailed
from buffer.run.run import Run
from buffer.weights import delta
from buffer.weights.folder_manifest import verify
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import PublishedWeights, Save
from buffer.weights.transports import WeightsReceiver
from buffer.wire.rollout import PolicyVersion
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.trainer import Trainer
from consumer.handle.rollout_consumer import RolloutConsumer
from rolloutmq.config.config import Config
from tests.consumer.grpo.training_config import GROUPS, STEPS, training_config
from tests.consumer.handle.crew import at_work

DRAWS = 5 * GROUPS + 6


@pytest.fixture
def config(tmp_path: Path, run: Run) -> Config:
    folder = tmp_path / "run"
    folder.mkdir()
    return training_config(run.name, folder, trainer={"keep_weights": 9})


def wrap_write(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]
) -> list[tuple[PolicyVersion, PublishedWeights]]:
    """Call `before` with the number of each version that is written; return what was written."""
    write = FolderSender.write
    written: list[tuple[PolicyVersion, PublishedWeights]] = []

    def wrapped(self: FolderSender, weights: PolicyVersion, save: Save) -> PublishedWeights:
        before(weights.version)
        published = write(self, weights, save)
        written.append((weights, published))
        return published

    monkeypatch.setattr(FolderSender, "write", wrapped)
    return written


def test_a_slow_publication_delays_the_step_after_the_next_and_no_version_is_left_out(
    run: Run, config: Config, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 is written only once step 2 is trained; step 3 is trained with 1 announced."""
    trained = threading.Event()
    announced: dict[int, int] = {}
    original = TrainController.train

    def train(self: TrainController, *args: Any) -> dict[str, float]:
        announced[self.policy.step + 1] = run.control.state().weights.version
        metrics = original(self, *args)
        if self.policy.step == 2:
            trained.set()
        return metrics

    def wait(version: int) -> None:
        assert version != 1 or trained.wait(400)

    written = wrap_write(monkeypatch, wait)
    monkeypatch.setattr(TrainController, "train", train)
    with at_work(run, math=DRAWS):
        assert Trainer(run, config, model_dir).fit(take_over=True)
    assert announced[2] == 0
    assert announced[3] >= 1
    assert [weights.version for weights, _ in written] == list(range(STEPS + 1))
    for _, published in written:
        verify(Path(published.address), published.checksum)
    state = run.control.state()
    assert PublishedWeights(state.weights_path, state.weights_checksum) == written[-1][1]


def test_a_trainer_publishes_changes_and_a_late_worker_makes_whole_versions_of_them(
    run: Run, config: Config, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"policy": {"delta_base_every": 3}, "learner": {"learning_rate": 1e-6, "bf16": True}}
    config = Config.model_validate(config.model_dump() | changes)
    written = wrap_write(monkeypatch, lambda _: None)
    with at_work(run, math=DRAWS):
        assert Trainer(run, config, model_dir).fit(take_over=True)
    kinds = [delta.is_delta(Path(published.address)) for _, published in written]
    assert kinds == [version % 3 != 0 for version in range(STEPS + 1)]
    late = WeightsReceiver(run.store, run.keys)
    folder = late.fetch(written[-1][1])
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {
        file.name for file in folder.iterdir()
    }
    late.close()


def test_on_policy_steps_wait_for_their_weights(
    make_run: Callable[..., Run], config: Config, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(stale_threshold=1)
    taken: list[tuple[int, int]] = []
    take = RolloutConsumer.take_batch

    def watched(self: RolloutConsumer, step: int, *args: Any, **options: Any) -> Any:
        taken.append((step, run.control.state().weights.version))
        return take(self, step, *args, **options)

    monkeypatch.setattr(RolloutConsumer, "take_batch", watched)
    with at_work(run, math=DRAWS):
        assert Trainer(run, config, model_dir).fit(take_over=True)
    assert taken == [(step, step - 1) for step in range(1, STEPS + 1)]


def test_a_publication_that_fails_ends_the_run_and_the_next_trainer_publishes(
    run: Run, config: Config, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(version: int) -> None:
        if version == 2:
            raise OSError(28, "No space left on device")

    with at_work(run, math=DRAWS):
        with monkeypatch.context() as patch:
            written = wrap_write(patch, fail)
            with pytest.raises(PublicationFailed, match="No space left"):
                Trainer(run, config, model_dir).fit(take_over=True)
        state = run.control.state()
        assert (state.mode, state.weights) == ("run", written[-1][0])
        assert state.weights.version == 1
        assert Trainer(run, config, model_dir).fit(take_over=True)
    assert run.control.state().weights.version == STEPS
    assert run.account.fsck().clean
