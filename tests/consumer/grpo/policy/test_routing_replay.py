from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from buffer.errors import ConfigError, WireError
from buffer.maintenance.column_files import NO_FILES, ColumnFolder
from buffer.redis.payloads import checksum
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status
from buffer.wire.sampling import SampleParams
from consumer.config.learner import LearnerConfig, LossConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy.policy import Policy
from producer_workers.config.engine import TransformersConfig
from producer_workers.engines import build_engine
from tests.consumer.grpo.models.tiny import build_model, set_advantages, train_step
from tests.producer_workers.engines.tiny_model import write_tiny_model

LENGTHS = (30, 9, 17, 24)
ADVANTAGES = np.array([1.0, -1.0, 0.5, -0.5], np.float32)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a mixture of experts: none in the first layer, elsewhere two about equally good."""
    return write_mixture(tmp_path_factory.mktemp("mixture"), noise=1)


@pytest.fixture(scope="module")
def other_gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the same model with gates that differ by a thousandth, as on another machine."""
    return write_mixture(tmp_path_factory.mktemp("other"), noise=2)


def write_mixture(folder: Path, *, noise: int, twins: bool = True) -> Path:
    write_tiny_model(folder, seed=1, architecture="qwen3_moe", layers=3, dense_layers=[0])
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(noise)
    for name in sorted(name for name in weights if name.endswith("mlp.gate.weight")):
        weights[name][3] = weights[name][2] if twins else weights[name][3]
        weights[name] += 1e-3 * torch.randn(weights[name].shape, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def group(mixture: Path) -> RolloutGroup:
    """Rollouts of the real engine, which also returns what the gates chose."""
    return asyncio.run(roll_out(mixture))


async def roll_out(folder: Path) -> RolloutGroup:
    engine = build_engine(TransformersConfig(routed_experts=True), folder, PolicyVersion("main", 0))
    await engine.start()
    prompt, states = np.array([40, 41, 42, 43, 44], np.int32), []
    for index, length in enumerate(LENGTHS):
        params = SampleParams(
            max_tokens=length, seed=index
        )  # no min_tokens: it changes the distribution
        made = await engine.generate(str(index), prompt, params)
        state = RolloutState(
            index=index, prompt_ids=prompt, reward={"score": 0.0}, status=Status.COMPLETED
        )
        state.append(made.token_ids, made.logprobs, made.spans, **made.columns)
        states.append(state)
    await engine.shutdown()
    return RolloutGroup("moe-0000000001", "moe", states)


def learner(folder: Path, *, columns: ColumnFolder = NO_FILES, **options: Any) -> Policy:
    return Policy(folder, LearnerConfig(**{"learning_rate": 1e-3, **options}), columns=columns)


def mismatch(trainer: Policy, group: RolloutGroup) -> float:
    return train_step(trainer, [group], ADVANTAGES)["mismatch/abs_logprob"]


def test_replay_of_the_trainers_own_choice_changes_nothing(tmp_path: Path) -> None:
    folder = write_mixture(
        tmp_path, noise=1, twins=False
    )  # no two experts that a sum in another order decides between
    group = asyncio.run(roll_out(folder))
    plain = learner(folder)
    replayed = learner(folder, replay_routing=True)
    assert mismatch(plain, group) == mismatch(replayed, group) < 1e-4
    for name, weight in plain.parameters.items():
        assert torch.equal(weight, replayed.parameters[name]), name


@pytest.mark.parametrize("budget", [36, 4096], ids=["a row each", "rows shared"])
def test_replay_brings_trainer_and_engine_together_where_gates_differ(
    other_gates: Path, group: RolloutGroup, budget: int
) -> None:
    apart = mismatch(learner(other_gates, token_budget=budget), group)
    together = mismatch(learner(other_gates, token_budget=budget, replay_routing=True), group)
    assert together < apart / 5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kl", [0.0, 0.1], ids=["no reference", "reference"])
def test_replayed_gates_learn_by_the_true_gradient(
    other_gates: Path, group: RolloutGroup, checkpointing: bool, kl: float
) -> None:
    """Return the slope of the loss along its gradient with respect to a gate, numerically."""
    loss = LossConfig(kl_coef=kl)
    policy = learner(
        other_gates, replay_routing=True, gradient_checkpointing=checkpointing, loss=loss
    )
    trainer = TrainController(policy)
    gate = policy.parameters["model.layers.1.mlp.gate.weight"]
    packed = trainer.pack([group])
    packed = trainer.compute_ref_logprobs(packed)
    set_advantages(packed, ADVANTAGES)
    (update,) = packed.updates
    trainer._backward(update, 0)
    assert gate.grad is not None
    slope = gate.grad.norm()
    step = 1e-3
    direction = gate.grad / slope
    losses = []
    for move in (step, -2 * step):
        gate.data += move * direction
        losses.append(trainer._backward(update, 0)["loss/policy"])
    assert float(slope) > 1e-3
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(slope), rel=0.05)


def test_replay_asks_for_the_experts_of_each_rollout_and_of_this_model(
    mixture: Path, group: RolloutGroup, tmp_path: Path
) -> None:
    """Check columns, and files of the run: missing or foreign experts are always reported."""
    columns = ColumnFolder(tmp_path / "columns")
    states = [state.model_copy() for state in group.states]
    for state in states[:2]:
        assert isinstance(state.routed_experts, np.ndarray)
        name = f"experts-{state.index}.npy"
        state.routed_experts = columns.put(group.gid, name, state.routed_experts)
    mixed = RolloutGroup(group.gid, "moe", states)
    trainer = learner(mixture, columns=columns, replay_routing=True)
    assert mismatch(trainer, mixed) == mismatch(learner(mixture, replay_routing=True), group)

    def refused(experts: Any, message: str) -> None:
        states[0].routed_experts = experts
        with pytest.raises(WireError, match=message):
            mismatch(trainer, RolloutGroup(group.gid, "moe", states))

    def kept(data: bytes) -> str:
        (tmp_path / "columns" / group.gid / "other.npy").write_bytes(data)
        return f"{group.gid}/other.npy#{checksum(data)}"

    whole = group.states[0].routed_experts
    assert isinstance(whole, np.ndarray)
    refused(None, "has no routed experts")
    refused(f"{group.gid}/none.npy", "cannot be read")
    refused("/etc/passwd", "no file of a run")
    refused(kept(npy(whole)).partition("#")[0], "CRC-32")
    changed = np.where(np.arange(len(whole))[:, None, None] == 0, whole[:, :, ::-1], whole)
    named = kept(npy(whole))
    kept(npy(changed))  # experts that this model has, in place of those that were sampled with
    refused(named, "CRC-32")
    refused(kept(b"no array"), "cannot be read")
    refused(kept(npy(whole)[:-1]), "cannot be read")
    refused(kept(npy(whole.astype("<f8")[:3])), "type float64")
    refused(kept(npy(whole).replace(b"(%d," % len(whole), b"(%d," % 10**15, 1)), "cannot be read")
    refused(kept(npy(np.repeat(whole, 2, 0))), "more than")
    refused(whole[1:], "routed experts of shape")
    refused(whole[..., :1], "have different shapes")
    refused(np.where(whole == 3, 4, whole), "a routed expert outside 0 to 3")


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_a_group_without_experts_of_this_model_is_left_out_and_ends_no_trainer(
    mixture: Path, group: RolloutGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """In either form: what one worker submits must not stop every trainer."""
    foreign = [state.model_copy(update={"routed_experts": None}) for state in group.states]
    bad = RolloutGroup("moe-0000000002", "moe", foreign)
    once, both = (TrainController(learner(mixture, replay_routing=True)) for _ in range(2))
    expected = once.fit([group])
    metrics = both.fit([bad, group])
    assert metrics == expected | {"filtered/routed_experts": 1.0}
    assert "rollout 0 has no routed experts" in caplog.text
    with pytest.raises(ConfigError, match="no group of the batch has experts"):
        both.fit([bad])


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experts whose choice"):
        learner(build_model(tmp_path), replay_routing=True)
