from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from buffer.errors import ConfigError, ModelError, RolloutMQError, WireError
from buffer.weights.folder_manifest import verify
from buffer.weights.shared_folder import FolderSender
from buffer.wire.rollout import PolicyVersion
from consumer.config.critic import CriticConfig
from consumer.config.learner import LearnerConfig, OptimizerKind
from consumer.grpo.learner.critic import Critic
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.model_state.optimizers import make_optimizer
from consumer.grpo.model_state.saved_state import Rows, SavedState, write_state
from consumer.grpo.policy.policy import Policy
from consumer.handle.checkpoint import check_state
from consumer.handle.ranks import Ranks
from tests.consumer.grpo.models.tiny import build_model, make_group
from tests.thoroughness import examples

SHAPES = {"a": (7, 3), "b": (1,), "c": (16, 2, 2), "e": (3,)}


class Rank(Ranks):
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


def rows_of(rank: int, size: int, sharded: frozenset[str]) -> dict[str, Rows]:
    rows = {}
    for name in sharded:
        total = SHAPES[name][0]
        each = -(-total // size)
        first = min(rank * each, total)
        rows[name] = Rows(first, min(each, total - first), total)
    return rows


def write(folder: Path, size: int, sharded: frozenset[str]) -> dict[str, torch.Tensor]:
    whole = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for rank in range(size):
        rows = rows_of(rank, size, sharded)
        own = {
            name: tensor[rows[name].first :][: rows[name].size] if name in rows else tensor
            for name, tensor in whole.items()
        } | {"rng": torch.tensor(rank), "step": torch.tensor(5)}
        write_state(folder, {n: t.contiguous() for n, t in own.items()}, rows, Rank(rank, size))
    return whole


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writers=st.integers(1, 5),
    readers=st.integers(1, 5),
    written=st.frozensets(st.sampled_from(sorted(SHAPES))),
    read=st.frozensets(st.sampled_from(sorted(SHAPES))),
)
def test_any_ranks_read_what_any_other_ranks_wrote(
    tmp_path_factory: pytest.TempPathFactory,
    writers: int,
    readers: int,
    written: frozenset[str],
    read: frozenset[str],
) -> None:
    folder = tmp_path_factory.mktemp("state")
    whole = write(folder, writers, written)
    check_state(folder)
    for rank in range(readers):
        rows = rows_of(rank, readers, read)
        with SavedState(folder, rows, rank) as state:
            assert set(state) == {*SHAPES, "rng", "step"}
            assert int(state["step"]) == 5
            assert int(state["rng"]) == (rank if rank < writers else 0)
            for name, tensor in whole.items():
                first, count, _ = rows.get(name, Rows(0, len(tensor), len(tensor)))
                assert torch.equal(state[name], tensor[first : first + count]), name


@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_torn_state_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 3, frozenset(SHAPES))
    file = tmp_path / "state-00001-of-00003.safetensors"
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else b"")
    for read in (check_state, SavedState):
        with pytest.raises(ModelError, match="state-00001-of-00003"):
            read(tmp_path)


def test_state_of_a_model_with_more_rows_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 2, frozenset({"a"}))
    with (
        SavedState(tmp_path, {"a": Rows(0, 4, 8)}) as state,
        pytest.raises(ModelError, match="the 8 rows"),
    ):
        state["a"]


def test_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    """Files may not grow, which the kernel refuses in the same place."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RolloutMQError, match="cannot be written") as caught:
            write_state(tmp_path, {"x": torch.zeros(1 << 20)}, {}, Ranks())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in caught.value.message


def save(folder: Path) -> None:
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(bytes(range(256)))


def publish(shared: FolderSender, version: int) -> Path:
    path, _ = shared.write(PolicyVersion("ab12cd34", version), save)
    shared.prune()
    return Path(path)


@pytest.mark.parametrize("damage", ["torn", "changed", "gone", "manifest", "other"])
def test_reader_refuses_a_folder_that_is_not_what_was_published(
    tmp_path: Path, damage: str
) -> None:
    path, checksum = FolderSender(tmp_path).write(PolicyVersion("ab12cd34", 4), save)
    file = Path(path) / "model.safetensors"
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "changed":
        file.write_bytes(bytes(reversed(range(256))))
    elif damage == "gone":
        file.unlink()
    elif damage == "manifest":
        (Path(path) / "manifest.json").write_text("{}", encoding="utf-8")
    else:
        checksum = FolderSender(tmp_path).write(PolicyVersion("ab12cd34", 5), save)[1]
    with pytest.raises((WireError, OSError)):
        verify(Path(path), checksum)


def test_write_leaves_nothing_when_saving_fails(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        save(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        FolderSender(tmp_path).write(PolicyVersion("ab12cd34", 4), fail)
    assert list(tmp_path.iterdir()) == []


def test_prune_keeps_the_newest_and_what_is_not_weights(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "notes-2024").mkdir()
    shared = FolderSender(tmp_path, keep=2)
    for version in range(4):
        publish(shared, version)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"precious", "notes-2024", "ab12cd34-000002", "ab12cd34-000003"}


def test_prune_keeps_what_was_just_published_when_the_clock_was_set_back(tmp_path: Path) -> None:
    shared = FolderSender(tmp_path, keep=2)
    for version in range(3):
        path = publish(shared, version)
        os.utime(path, (4e9, 4e9))
    assert publish(shared, 3).exists()


def test_clear_deletes_what_a_killed_writer_left(tmp_path: Path) -> None:
    shared = FolderSender(tmp_path)
    path = publish(shared, 1)
    (tmp_path / f".{path.name}.0123abcd.tmp").mkdir()
    (tmp_path / ".something.tmp").mkdir()
    shared.clear()
    assert {p.name for p in tmp_path.iterdir()} == {path.name, ".something.tmp"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # some tensors of more than 4,096 values, which have 8 bits, and some of fewer
    return build_model(tmp_path_factory.mktemp("models"), intermediate=200)


def make_controller(model_dir: Path, optimizer: OptimizerKind) -> TrainController:
    config = LearnerConfig(optimizer=optimizer, learning_rate=1e-3)
    policy = Policy(model_dir, config, seed=7)
    critic = Critic(model_dir, CriticConfig(), policy, seed=7)
    return TrainController(policy, "gae", critic=critic)


def fit(controller: TrainController, step: int) -> dict[str, Any]:
    return controller.fit([make_group(100 * step + i, prompt=3 + i) for i in range(3)])


def test_eight_bit_states_are_saved_and_resumed_bit_for_bit(
    model_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    straight = make_controller(model_dir, "adamw_8bit")
    for step in range(2):
        fit(straight, step)
    save_file(straight.state_tensors(), tmp_path / "state.safetensors")
    state = load_file(tmp_path / "state.safetensors")
    moments = [name for name in state if name.startswith("optimizer/state2/")]
    assert {state[name].dtype for name in moments} == {torch.uint8, torch.float32}

    resumed = make_controller(model_dir, "adamw_8bit")
    resumed.load_state_tensors(state)
    for step in range(2, 4):
        assert fit(resumed, step) == fit(straight, step)
    again = resumed.state_tensors()
    for name, tensor in straight.state_tensors().items():
        assert torch.equal(tensor, again[name]), name


def test_a_state_of_the_other_optimizer_is_refused_and_changes_nothing(model_dir: Path) -> None:
    controller = make_controller(model_dir, "adamw")
    fit(controller, 0)
    before = controller.state_tensors()
    other = {
        name.replace("exp_avg_sq", "state2").replace("exp_avg", "state1"): tensor + 1
        for name, tensor in before.items()
    }
    with pytest.raises(ModelError, match=r"optimizer = adamw_8bit, not of adamw"):
        controller.load_state_tensors(other)
    after = controller.state_tensors()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_several_ranks_and_a_missing_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ConfigError, match="cannot run on 2 ranks"):
        make_optimizer("adamw_8bit", parameters, rate=1e-3, ranks=2)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match="needs the package bitsandbytes") as refused:
        Policy(build_model(tmp_path), LearnerConfig(optimizer="adamw_8bit"))
    assert "pip install 'bitsandbytes" in str(refused.value.hint)
