from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file

from buffer.config.assignments import parse_settings
from buffer.control.control import Mode
from buffer.errors import Fenced, GroupChanged, LedgerError, LostRun
from buffer.run.run import Run
from buffer.run.settings import LiveSettings
from buffer.weights.shared_folder import FolderSender
from buffer.wire.group import RolloutGroup
from consumer.grpo.export import export_model
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy.policy import Policy
from consumer.grpo.trainer import Trainer
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.rollout_consumer import RolloutConsumer
from consumer.handle.sample_log import Sample, SampleLog
from consumer.handle.step_log import StepLog, StepWriter, TrainedStep, read_evaluations
from rolloutmq.config.config import Config
from rolloutmq.launch.create import create_run
from tests.buffer.time_machine import put_back, remember
from tests.consumer.grpo.models.tiny import build_model
from tests.consumer.grpo.training_config import GROUPS, STEPS, training_config
from tests.consumer.handle.crew import MEMBERS, at_work
from tests.memory_fault import overwrite
from tests.servers import on_both

STATE = "state-00000-of-00001.safetensors"
DRAWS = 5 * GROUPS + 6


class Killed(BaseException):
    """Stands for SIGKILL: no handler catches it."""


with_adapter_too = pytest.mark.parametrize(
    "config", [None, {"rank": 4}], ids=["weights", "adapter"], indirect=True
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model of one layer: each life of a trainer loads it."""
    return build_model(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture
def config(request: pytest.FixtureRequest, tmp_path: Path, run: Run) -> Config:
    lora = getattr(request, "param", None)
    return training_config(
        run.name,
        tmp_path / "run",
        tasks={"quiz": {"eval_of": "math"}},
        learner={"warmup_steps": 2, "decay_steps": 5, "lora": lora},
        engine={"max_lora_rank": 8 if lora else None},
        evaluation={"groups": 3},
    )


def train(run: Run, config: Config, model_dir: Path) -> bool:
    """One life of a trainer, from its start to its end."""
    config.run.folder.mkdir(exist_ok=True)
    return Trainer(run, config, model_dir).fit(take_over=True)


def colocated(config: Config) -> Config:
    changes: dict[str, Any] = {
        "policy": {"pause_mode": "abort"},
        "trainer": config.trainer.model_dump() | {"flow": "colocated"},
        "engine": config.engine.model_dump() | {"kv_cache_memory_bytes": 1 << 30},
    }
    return Config.model_validate(config.model_dump() | changes)


def history(config: Config) -> StepLog:
    log = StepLog(config.run.folder / "steps.jsonl")
    log.read_new()
    return log


def last_state(config: Config) -> dict[str, torch.Tensor]:
    return load_file(config.run.folder / "checkpoints" / f"step-{STEPS:06d}" / STATE)


def published(run: Run) -> list[str]:
    rows = [fields for _, fields in run.store.client.xrange(run.keys.events)]
    return [
        row[b"weights"].decode().rpartition(":")[2] for row in rows if row[b"event"] == b"weights"
    ]


@pytest.fixture(scope="module")
def ends() -> dict[bool, dict[str, Any]]:
    return {False: {}, True: {}}


@pytest.fixture
def undisturbed(ends: dict[bool, dict[str, Any]], config: Config) -> dict[str, Any]:
    """Return the end of an undisturbed trainer; the first test that needs it creates it."""
    return ends[config.learner.lora is not None]


def check_end(run: Run, config: Config, undisturbed: dict[str, Any]) -> None:
    log = history(config)
    assert [step.step for step in log.steps] == list(range(1, STEPS + 1))
    assert log.trained_twice() == {}
    assert run.account.fsck().clean
    assert run.ledger.steps() == (STEPS, STEPS, 4)
    assert CheckpointFolder(config.run.folder / "checkpoints").steps() == [4, 5]
    assert set(read_evaluations(config.run.folder)) == {("quiz", 0), ("quiz", STEPS)}
    gids = [step.gids for step in log.steps]
    samples = SampleLog(config.run.folder)
    logged = [[sample["gid"] for sample in samples.read(step + 1)] for step in range(STEPS)]
    assert [sorted(each) for each in logged] == [sorted(each) for each in gids]
    assert logged == undisturbed.setdefault("logged", logged)
    for step in log.steps:
        check_numbers(step, samples.read(step.step, tokens=True))
    check_training(config, undisturbed)


def check_training(config: Config, undisturbed: dict[str, Any]) -> None:
    gids = [step.gids for step in history(config).steps]
    state = last_state(config)
    assert gids == undisturbed.setdefault("gids", gids)
    for name, tensor in undisturbed.setdefault("state", state).items():
        assert torch.equal(tensor, state[name]), name


def check_numbers(step: TrainedStep, samples: list[Sample]) -> None:
    """All groups are logged: what is kept by token has the means that the metrics have."""
    assert step.host == socket.gethostname()
    assert 0 < step.metrics["system/memory_bytes"] < step.metrics["system/memory_total_bytes"]
    assert sum(step.histograms["response_len"].counts) == GROUPS * MEMBERS
    members = [member for sample in samples for member in sample["members"]]
    mask, engine, trainer, entropy = (
        np.concatenate([np.array(member[name], float) for member in members])
        for name in ("response_mask", "logprobs", "trainer_logprobs", "entropy")
    )
    trained = (mask > 0) & np.isfinite(trainer)
    assert trained.any()
    for name, values in (
        ("policy/entropy", entropy), ("mismatch/abs_logprob", np.abs(trainer - engine)),
    ):  # fmt: skip
        assert values[trained].mean() == pytest.approx(step.metrics[name], abs=5e-3), name


@on_both
@with_adapter_too
def test_undisturbed_trainer_ends_with_a_clean_account(
    run: Run, config: Config, model_dir: Path, undisturbed: dict[str, Any]
) -> None:
    with at_work(run, stamp=0, math=DRAWS):
        assert train(run, config, model_dir)
    check_end(run, config, undisturbed)
    steps = [step.metrics for step in history(config).steps]
    lengths = sum(metrics["response_len/tokens"] for metrics in steps) / (STEPS * GROUPS * MEMBERS)
    assert steps[-1]["trained_len/mean/math"] == lengths
    assert 0.7 < steps[-1]["length_bias/mean/math"] < 1.4
    # what makes the comparison of the other tests mean something: training did move the weights
    start = Policy(model_dir, config.learner, seed=3).parameters
    assert any(not torch.equal(start[n], undisturbed["state"][f"model/{n}"]) for n in start)
    kept = list((config.run.folder / "weights").iterdir())
    assert len(kept) == 2
    assert all(
        (folder / "adapter_config.json").exists() == bool(config.learner.lora) for folder in kept
    )


CRASHES: list[tuple[type, str, int]] = [
    (RolloutConsumer, "open", 1), (FolderSender, "write", 1), (RolloutConsumer, "evaluate", 1),
    (RolloutConsumer, "take_batch", 1), (TrainController, "train", 4), (FolderSender, "write", 4),
    (RolloutConsumer, "pause", 4), (RolloutConsumer, "publish_weights", 4),
    (RolloutConsumer, "continue_", 4), (StepWriter, "add_step", 4), (CheckpointFolder, "begin", 1),
    (CheckpointFolder, "complete", 1), (CheckpointFolder, "begin", 2),
    (CheckpointFolder, "complete", 2), (CheckpointFolder, "prune", 3),
    (RolloutConsumer, "commit", 2), (RolloutConsumer, "evaluate", 2),
    (StepWriter, "add_evaluation", 2), (RolloutConsumer, "finish", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "method", "call"), CRASHES, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_trainer_ends_as_if_undisturbed_when_it_dies_right_after(
    run: Run,
    config: Config,
    model_dir: Path,
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    call: int,
) -> None:
    calls = []

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            calls.append(method)
            if len(calls) == call:
                raise Killed
            return result

        return wrapped

    with at_work(run, stamp=0, math=DRAWS):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, dying(getattr(owner, method)))
            patch.setattr(
                RolloutConsumer, "close", lambda self: self.role.ended.set()
            )  # a killed trainer does not give up its role
            with pytest.raises(Killed):
                train(run, config, model_dir)
        assert train(run, config, model_dir)
    check_end(run, config, undisturbed)


def test_stopped_trainer_keeps_its_step_and_continues_from_it(
    run: Run,
    config: Config,
    model_dir: Path,
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stop it while it waits for a receipt that never comes: it trains, but does not publish."""
    with at_work(run, stamp=0, math=DRAWS) as crew:
        trainer = Trainer(run, config, model_dir)
        original = TrainController.train

        def stop_after(self: TrainController, *args: Any) -> dict[str, float]:
            metrics = original(self, *args)
            if self.policy.step == 3:
                crew.silent = True
                threading.Timer(0.2, trainer.consumer.stop).start()
            return metrics

        with monkeypatch.context() as patch:
            patch.setattr(TrainController, "train", stop_after)
            assert not trainer.fit()
        state = run.control.state()
        assert state.mode == "run"
        assert state.weights.version in (1, 2)
        trained = [step.step for step in history(config).steps]
        assert trained in ([1, 2, 3], [1, 2, 3, 4])  # it waits with the weights of 2, or of 3
        assert run.ledger.steps()[1] == trained[-1]
        crew.silent = False
        assert train(run, config, model_dir)
    assert history(config).replaced == 0
    check_training(config, undisturbed)


@pytest.mark.parametrize("flow", ["foreground", "exclusive", "background"])
def test_weights_are_evaluated_every_so_many_steps_and_training_is_the_same(
    run: Run, config: Config, model_dir: Path, undisturbed: dict[str, Any], flow: str
) -> None:
    changes: dict[str, Any] = {"evaluation": {"groups": 3, "every_steps": 2, "flow": flow}}
    config = Config.model_validate(
        config.model_dump() | changes | {"policy": {"pause_mode": "abort"}}
    )
    with at_work(run, stamp=0, math=DRAWS) as crew:
        assert train(run, config, model_dir)
    found = read_evaluations(config.run.folder)
    assert set(found) == {("quiz", step) for step in (0, 2, 4, 5)}
    for (_, step), metrics in found.items():
        assert metrics["eval/groups"] == 3
        # weights of its step made them; in the background, those that were begun late may be of the
        # next
        assert metrics["eval/newest_version"] == step or (
            flow == "background" and metrics["eval/newest_version"] > step
        )
    modes = {mode for lane, mode in crew.claimed if lane == "eval"}
    assert modes == ({Mode.ABORT} if flow == "exclusive" else {Mode.RUN})
    log = history(config)
    assert [step.gids for step in log.steps] == undisturbed.setdefault(
        "gids", [step.gids for step in log.steps]
    )
    assert not any(gid.startswith("quiz") for step in log.steps for gid in step.gids)
    assert int(run.progress("math")["consumed"]) == STEPS * GROUPS
    assert run.evaluations.steps()[:2] == (4, 4)
    assert run.account.fsck().clean


@with_adapter_too
def test_learner_and_engines_take_turns_and_no_number_changes_when_they_share_a_device(
    run: Run,
    config: Config,
    model_dir: Path,
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines sleep in an abort without open lanes (tests/pipeline/test_colocated.py).

    The learner sleeps otherwise.
    """
    config = colocated(config)
    config.run.folder.mkdir()
    trainer = Trainer(run, config, model_dir)
    turns: list[tuple[str, bool, str]] = []

    def watched(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            state = run.control.state()
            turns.append(
                (
                    name,
                    trainer.rank.controller.policy.is_asleep,
                    " ".join([state.mode, *state.lanes]),
                )
            )
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr(TrainController, "train", watched(TrainController.train, "train"))
    monkeypatch.setattr(RolloutConsumer, "take_batch", watched(RolloutConsumer.take_batch, "take"))
    with at_work(run, stamp=0, math=DRAWS):
        assert trainer.fit(take_over=True)
    assert turns == [("take", True, "run eval resume fresh"), ("train", False, "abort")] * STEPS
    check_training(config, undisturbed)


def test_a_stop_in_the_pause_before_a_step_keeps_the_step_for_the_next_trainer(
    run: Run,
    config: Config,
    model_dir: Path,
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch is taken, no worker confirms the pause, and the signal comes: nothing is trained."""
    config = colocated(config)
    config.run.folder.mkdir()
    trainer = Trainer(run, config, model_dir)
    pause = RolloutConsumer.pause
    with at_work(run, stamp=0, math=DRAWS) as crew:

        def stopped(consumer: RolloutConsumer, *args: Any, **kwargs: Any) -> float:
            if run.ledger.steps()[0] == 3:
                crew.silent = True
                trainer.stop()
            return pause(consumer, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(RolloutConsumer, "pause", stopped)
            assert not trainer.fit(take_over=True)
        crew.silent = False
        assert [step.step for step in history(config).steps] == [1, 2]
        assert CheckpointFolder(config.run.folder / "checkpoints").steps()[-1] == 2
        assert train(run, config, model_dir)
    check_end(run, config, undisturbed)


def test_trainer_publishes_ahead_of_its_interval_when_its_weights_can_serve_no_further_step(
    make_run: Callable[..., Run], config: Config, model_dir: Path
) -> None:
    """Its config has 4 steps per publication, but weights of the run serve only 2."""
    run = make_run(stale_threshold=2)
    config = config.model_copy(
        update={"policy": config.policy.model_copy(update={"sync_weights_interval": 4})}
    )
    with at_work(run, math=DRAWS):
        assert train(run, config, model_dir)
    assert published(run) == ["0", "2", "4", "5"]
    assert [step.step for step in history(config).steps] == [1, 2, 3, 4, 5]


def test_a_role_of_train_roles_that_no_rollout_has_is_reported_once(
    run: Run, config: Config, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = config.tasks["math"].model_copy(update={"train_roles": ["", "solver"]})
    config = config.model_copy(update={"tasks": config.tasks | {"math": task}})
    with at_work(run, math=DRAWS), caplog.at_level("ERROR", "rolloutmq.trainer"):
        assert train(run, config, model_dir)
    assert caplog.text.count("no rollout of task math has the role solver") == 1


def test_trainer_publishes_and_asks_again_when_a_step_cannot_be_made_any_more(
    make_run: Callable[..., Run],
    config: Config,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lower max_staleness between two steps: the decision after the first is no longer right."""
    run = make_run(stale_threshold=4)
    config = config.model_copy(
        update={"policy": config.policy.model_copy(update={"sync_weights_interval": 4})}
    )
    original = StepWriter.add_step

    def lower(self: StepWriter, step: int, *args: Any) -> None:
        if step == 2:
            run.set(parse_settings(LiveSettings, ["max_staleness=0"]))
        original(self, step, *args)

    monkeypatch.setattr(StepWriter, "add_step", lower)
    with at_work(run, math=DRAWS), caplog.at_level("WARNING", "rolloutmq.trainer"):
        assert train(run, config, model_dir)
    assert (
        caplog.text.count(
            "publishing weights before they are due: step 3 cannot be served by the weights"
        )
        == 1
    )
    assert published(run) == ["0", "2", "3", "4", "5"]
    assert [step.step for step in history(config).steps] == [1, 2, 3, 4, 5]
    assert run.account.fsck().clean


def test_fenced_trainer_writes_nothing_that_the_next_one_reads(
    run: Run, config: Config, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.model_copy(
        update={"policy": config.policy.model_copy(update={"sync_weights_interval": 3})}
    )
    second = RolloutConsumer(run)
    original = TrainController.train

    def taken_over(self: TrainController, *args: Any) -> dict[str, float]:
        metrics = original(self, *args)
        if self.policy.step == 2:
            second.open(0, take_over=True)
        return metrics

    monkeypatch.setattr(TrainController, "train", taken_over)
    with at_work(run, stamp=0, math=DRAWS), pytest.raises(Fenced):
        train(run, config, model_dir)
    assert [step.step for step in history(config).steps] == [1]
    assert CheckpointFolder(config.run.folder / "checkpoints").steps() == []
    second.check_role()
    second.close()


@on_both
def test_trainer_continues_when_the_server_lost_steps_or_everything(
    run: Run,
    make_run: Callable[..., Run],
    config: Config,
    model_dir: Path,
    undisturbed: dict[str, Any],
) -> None:
    def train_to(step: int, **options: bool) -> bool:
        make_run(steps=step)  # it continues, if it was finished
        longer = config.model_copy(update={"plan": config.plan.model_copy(update={"steps": step})})
        config.run.folder.mkdir(exist_ok=True)
        with at_work(run, stamp=None if options else 0, math=DRAWS):
            return Trainer(run, longer, model_dir).fit(take_over=True, **options)

    raw = run.store.at(run.keys.meta).client
    assert train_to(2)
    moment = remember(raw, run.name)
    assert train_to(4)
    put_back(raw, run.name, moment)
    assert train_to(STEPS)
    assert run.progress("math")["reasserted"] == "6"
    check_training(config, undisturbed)

    put_back(raw, run.name, {})
    with pytest.raises(LostRun, match="no such run"):
        create_run(run.store, config, model_dir)
    with pytest.raises(LostRun, match="no trainer has ever opened"):
        train_to(STEPS + 1)
    assert train_to(STEPS + 1, regenerate=True)
    assert run.account.fsck().clean
    assert [step.step for step in history(config).steps] == list(range(1, STEPS + 2))
    assert history(config).trained_twice() == {}
    assert run.progress("math")["archived"] == str(GROUPS * STEPS)


@pytest.mark.parametrize("lost", [False, True], ids=["server whole", "server lost a step"])
@pytest.mark.parametrize("left", [[4], []], ids=["older checkpoint", "no checkpoint"])
def test_trainer_ends_as_if_undisturbed_from_an_older_checkpoint_or_none(
    run: Run,
    make_run: Callable[..., Run],
    config: Config,
    model_dir: Path,
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    left: list[int],
    lost: bool,
) -> None:
    """Lose the newest checkpoints, and perhaps the server's last second as well.

    Kept batches are delivered again, and the weights are the same; freed ones are generated
    again, in another order, if that is requested.
    """
    raw = run.store.at(run.keys.meta).client
    original = StepWriter.add_step
    moments: dict[int, Any] = {}

    def remembering(self: StepWriter, step: int, *rest: Any) -> None:
        moments[step] = remember(raw, run.name)
        original(self, step, *rest)

    with at_work(run, stamp=0, math=DRAWS), monkeypatch.context() as patch:
        patch.setattr(StepWriter, "add_step", remembering)
        assert train(run, config, model_dir)
    checkpoints = CheckpointFolder(config.run.folder / "checkpoints")
    for step in set(checkpoints.steps()) - set(left):
        shutil.rmtree(checkpoints.path(step))
    if lost:
        put_back(raw, run.name, moments[4])
    make_run(steps=STEPS + 1)  # a finished run continues when it gets another plan
    make_run(steps=STEPS)
    with at_work(run, stamp=0, math=DRAWS):
        if not left:
            with pytest.raises(LedgerError, match="already freed"):
                Trainer(run, config, model_dir).fit(take_over=True)
        assert Trainer(run, config, model_dir).fit(take_over=True, regenerate=not left)
    log = history(config)
    assert log.trained_twice() == {}
    assert [step.step for step in log.steps] == list(range(1, STEPS + 1))
    if left:
        check_training(config, undisturbed)
    assert run.account.fsck().clean


def test_trainer_publishes_in_bfloat16_when_it_computes_in_it(
    run: Run, config: Config, model_dir: Path
) -> None:
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"bf16": True})})
    with at_work(run, stamp=0, math=DRAWS):
        assert train(run, config, model_dir)
    published = load_file(Path(run.control.state().weights_path) / "model.safetensors")
    exported = config.run.folder / "exported"
    export_model(config, model_dir, STEPS, exported, "float32")
    kept = load_file(exported / "model.safetensors")
    assert published.keys() == kept.keys()
    for name, tensor in kept.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(published[name], tensor.bfloat16()), name
    assert (
        orjson.loads((Path(run.control.state().weights_path) / "config.json").read_bytes())["dtype"]
        == "bfloat16"
    )


def test_full_memory_makes_the_trainer_write_checkpoints_ahead_of_time(
    make_run: Callable[..., Run], config: Config, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(low_bytes=5000, high_bytes=9000, steps=STEPS, batch_size=GROUPS)
    trainer = config.trainer.model_copy(
        update={"checkpoint_every_steps": 1000, "keep_checkpoints": 2}
    )
    with at_work(run, math=DRAWS):
        assert train(run, config.model_copy(update={"trainer": trainer}), model_dir)
    assert len(history(config).steps) == STEPS
    assert "memory is full of batches that are not committed" in caplog.text
    assert run.account.fsck().clean


def test_a_step_whose_groups_changed_in_memory_is_not_published_or_committed(
    run: Run,
    config: Config,
    model_dir: Path,
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = TrainController.fit
    steps = []

    def overwriting(controller: TrainController, groups: list[RolloutGroup]) -> dict[str, float]:
        metrics = fit(controller, groups)
        steps.append(groups[-1].gid)
        if len(steps) == 3:
            overwrite(groups[-1].logprobs)
        return metrics

    with at_work(run, stamp=0, math=DRAWS):
        with monkeypatch.context() as patch:
            patch.setattr(TrainController, "fit", overwriting)
            with pytest.raises(GroupChanged) as error:
                train(run, config, model_dir)
        assert steps[-1] in str(error.value)
        assert [step.step for step in history(config).steps] == [1, 2]
        taken, committed, _ = run.ledger.steps()
        assert taken == 3
        assert committed in (0, 2)  # the checkpoint of step 2 may be in writing
        assert CheckpointFolder(config.run.folder / "checkpoints").steps() in ([], [2])
        assert run.control.state().weights.version < 3
        assert "3" not in published(run)
        assert train(run, config, model_dir)
    check_end(run, config, undisturbed)
