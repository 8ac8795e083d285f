from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from buffer.errors import ConfigError, ModelError
from consumer.config.critic import CriticConfig
from consumer.config.learner import LearnerConfig, OptimizerKind
from consumer.grpo.learner.critic import Critic
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.model_state.optimizers import make_optimizer
from consumer.grpo.policy.policy import Policy
from tests.consumer.grpo.models.tiny import build_model, make_group


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
