from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from buffer.errors import ConfigError, GradientNotFinite, ModelError
from buffer.wire.group import RolloutGroup
from consumer.config.learner import LearnerConfig, LoraConfig, LossConfig
from consumer.grpo.learner.advantages import grpo_advantages
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.model_state.optimizers import scheduled_rate
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.policy.policy import Policy
from tests.consumer.grpo.models.tiny import make_group, set_advantages, train_step


def make_learner(
    model_dir: Path, *, loss: dict[str, Any] | None = None, **options: Any
) -> TrainController:
    options = {"learning_rate": 1e-3, "warmup_steps": 2, "decay_steps": 6} | options
    config = LearnerConfig(loss=LossConfig(**(loss or {})), **options)
    return TrainController(Policy(model_dir, config, seed=7))


def make_batch(step: int, groups: int = 3) -> tuple[list[RolloutGroup], np.ndarray]:
    batch = [make_group(100 * step + i, prompt=3 + i) for i in range(groups)]
    return batch, grpo_advantages([g.scores for g in batch])


def weights(learner: TrainController) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.policy.parameters.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"updates_per_batch": 2, "old_policy": "current"},
        {"loss": {"kl_coef": 0.1, "entropy_coef": 0.01}},
        {"lora": LoraConfig(rank=4), "loss": {"kl_coef": 0.1}},
    ],
)
def test_learner_continues_bit_for_bit_after_save_and_load(
    model_dir: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    straight = make_learner(model_dir, **options)
    for step in range(4):
        last = train_step(straight, *make_batch(step))

    first = make_learner(model_dir, **options)
    for step in range(2):
        train_step(first, *make_batch(step))
    save_file(first.state_tensors(), tmp_path / "state.safetensors")
    second = make_learner(model_dir, **options)
    second.load_state_tensors(load_file(tmp_path / "state.safetensors"))
    for step in range(2, 4):
        resumed = train_step(second, *make_batch(step))

    assert resumed == last
    for name, tensor in straight.state_tensors().items():
        assert torch.equal(tensor, second.state_tensors()[name]), name


def test_state_tensors_do_not_change_when_training_continues(model_dir: Path) -> None:
    learner = make_learner(model_dir)
    train_step(learner, *make_batch(0))
    state = learner.state_tensors()
    before = {name: tensor.clone() for name, tensor in state.items()}
    train_step(learner, *make_batch(1))
    assert all(torch.equal(before[name], state[name]) for name in state)


def test_load_state_tensors_refuses_the_state_of_another_model(model_dir: Path) -> None:
    learner = make_learner(model_dir)
    state = learner.state_tensors()
    before = weights(learner)
    name = next(n for n in state if n.startswith("model/"))
    state[name] = torch.zeros(1)
    with pytest.raises(ModelError, match="another model"):
        learner.load_state_tensors(state)
    assert all(torch.equal(before[n], tensor) for n, tensor in weights(learner).items())


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_train_step_does_not_depend_on_the_token_budget(model_dir: Path, aggregation: str) -> None:
    loss = {"aggregation": aggregation, "max_tokens": 5 if aggregation == "fixed_length" else None}
    whole = make_learner(model_dir, loss=loss, token_budget=4096)
    pieces = make_learner(model_dir, loss=loss, token_budget=12)
    metrics = train_step(whole, *make_batch(0))
    other = train_step(pieces, *make_batch(0))
    assert metrics == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_train_step_is_not_changed_by_groups_that_teach_nothing_but_for_the_divisor(
    model_dir: Path,
) -> None:
    """Leaving out samples without advantage must give the gradient that computing them gives."""
    batch, advantages = make_batch(0)
    advantages[:4] = 0.0
    skipping = make_learner(model_dir)
    computing = make_learner(model_dir, loss={"entropy_coef": 1e-30})
    skipped = train_step(skipping, batch, advantages)
    computed = train_step(computing, batch, advantages)
    assert skipped["optim/grad_norm"] == pytest.approx(computed["optim/grad_norm"], rel=1e-4)
    assert skipped["batch/trained_share"] < computed["batch/trained_share"] == 1.0


def test_train_step_changes_no_weight_when_all_advantages_are_zero(model_dir: Path) -> None:
    learner = make_learner(model_dir, warmup_steps=0)
    train_step(learner, *make_batch(0))
    before = weights(learner)
    batch, advantages = make_batch(1)
    metrics = train_step(learner, batch, np.zeros_like(advantages))
    assert all(torch.equal(before[n], tensor) for n, tensor in weights(learner).items())
    assert metrics["optim/grad_norm"] == 0.0
    assert learner.policy.step == 2


def test_train_step_works_when_only_one_part_of_the_batch_teaches_something(
    model_dir: Path,
) -> None:
    learner = make_learner(model_dir, updates_per_batch=3)
    batch, advantages = make_batch(0)
    advantages[4:8] = 0.0
    assert "policy/entropy" in train_step(learner, batch, advantages)
    assert learner.policy.step == 3


def test_steps_without_a_finite_gradient_are_skipped_until_there_are_too_many_in_a_row(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner(model_dir, max_skipped_updates=2, updates_per_batch=3)
    batch, advantages = make_batch(0)
    one_bad = advantages.copy()
    one_bad[4:8] *= np.float32("inf")
    before = weights(learner)
    metrics = train_step(learner, batch, one_bad)
    assert metrics["optim/skipped_updates"] == 1
    assert all(np.isfinite(list(metrics.values())))
    assert f"step 2 is not finite: no weight was changed. Its groups: {batch[1].gid}" in caplog.text
    assert any(not torch.equal(before[n], tensor) for n, tensor in weights(learner).items())
    assert all(tensor.isfinite().all() for tensor in weights(learner).values())

    one_bad = advantages.copy()
    one_bad[8:] *= np.float32("inf")
    train_step(learner, batch, one_bad)
    # the last update was skipped: its successor is the second in a row, also after a restart
    again = make_learner(model_dir, max_skipped_updates=2, updates_per_batch=3)
    again.load_state_tensors(learner.state_tensors())
    before = weights(again)
    with pytest.raises(GradientNotFinite, match=f"2 optimizer steps in a row.*{batch[0].gid}"):
        train_step(again, batch, advantages * np.float32("nan"))
    assert all(torch.equal(before[n], tensor) for n, tensor in weights(again).items())


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"updates_per_batch": 2, "old_policy": "current"}, "old_logprobs"),
        ({"loss": {"kl_coef": 0.1}}, "ref_logprobs"),
    ],
)
def test_train_refuses_a_batch_without_the_logprobs_that_its_loss_reads(
    model_dir: Path, options: dict[str, Any], missing: str
) -> None:
    learner = make_learner(model_dir, **options)
    groups, advantages = make_batch(0)
    batch = learner.pack(groups)
    set_advantages(batch, advantages)
    with pytest.raises(ConfigError, match=f"the batch has no {missing}"):
        learner.train(batch)


def test_one_update_is_weighted_by_importance_without_a_second_forward_pass(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is that of min(w, cap) A logprob, with w = trainer's / rollout's probability."""
    learner = make_learner(
        model_dir, loss={"importance_cap": 1.5}, max_grad_norm=1e9, old_policy="current"
    )
    groups, advantages = make_batch(0)
    (update,) = learner.pack(groups).updates
    (packed,) = update.batches
    current = learner.policy.score(packed).logprobs
    weight = (current.detach() - packed.rollout_logprobs).exp().clamp(max=1.5)
    gain = torch.from_numpy(advantages)[packed.rollout][packed.sample] * packed.mask
    gradients = torch.autograd.grad(
        -(weight * gain * current).sum() / packed.mask.sum(),
        list(learner.policy.parameters.values()),
    )
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    passes = []
    score = learner.policy.score

    def counted(*args: Any, **options: Any) -> Any:
        passes.append(args)
        return score(*args, **options)

    monkeypatch.setattr(learner.policy, "score", counted)
    metrics = train_step(learner, groups, advantages)
    assert metrics["optim/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["policy/ratio"] == 1.0
    trained = packed.mask > 0
    assert metrics["mismatch/importance"] == pytest.approx(float(weight[trained].mean()), rel=1e-4)
    assert len(passes) == 1


def test_a_logprob_that_an_engine_got_wrong_does_not_rule_the_step(model_dir: Path) -> None:
    """It bounds the gradient of its token, for every objective, by the default settings."""
    for objective in ("ppo", "gspo", "cispo", "dppo", "sapo"):
        norms = []
        for logprob in (-3.0, -12.0, -18.0):
            learner = make_learner(model_dir, loss={"objective": objective})
            groups, advantages = make_batch(0)
            wrong = groups[0].logprobs.copy()
            columns = np.repeat(advantages[:4], groups[0].lengths) * groups[0].mask
            wrong[int(np.argmin(columns))] = logprob
            groups[0].columns["logprobs"] = wrong
            norms.append(train_step(learner, groups, advantages)["optim/grad_norm"])
        assert max(norms[1:]) < 2.5 * norms[0], objective


def test_importance_corrects_for_the_rollouts_in_every_update_of_a_batch(model_dir: Path) -> None:
    """The ratio moves with the updates, the weight of a token is that of the weights before."""
    learner = make_learner(model_dir, updates_per_batch=3, warmup_steps=0, decay_steps=None)
    groups, advantages = make_batch(0)
    batch = learner.compute_old_logprobs(learner.pack([groups[0]] * 3))
    set_advantages(batch, np.tile(advantages[:4], 3))
    found = [learner._update(update) for update in batch.updates]
    ratios = [metrics["policy/ratio"] for metrics in found if metrics]
    weights = [metrics["mismatch/importance"] for metrics in found if metrics]
    assert ratios[0] == pytest.approx(1.0, abs=1e-6)
    assert len(set(ratios)) == 3
    assert weights == pytest.approx([weights[0]] * 3)
    assert weights[0] != pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": {"importance_level": "geometric"}}, "importance_level = geometric .* cannot act"),
        ({"loss": {"objective": "cispo", "importance_cap": 3.0}}, "importance_cap .* cannot act"),
        ({"loss": {"objective": "sapo", "clip_low": 0.1}}, "clip_low cannot act"),
        (
            {"old_policy": "current", "loss": {"clip_low": 0.1, "dual_clip": 3.0}},
            "clip_low and dual_clip .* the ratio is always 1",
        ),
        *(
            ({"old_policy": "current", "loss": {"objective": name}}, "objective .* always 1")
            for name in ("gspo", "cispo", "dppo", "sapo")
        ),
        ({"warmup_steps": 6}, "must be larger than warmup_steps = 6"),
        ({"decay_steps": None, "schedule": "cosine"}, "schedule needs decay_steps"),
    ],
    ids=str,
)
def test_settings_that_cannot_act_together_are_refused(
    options: dict[str, Any], message: str
) -> None:
    options = {"warmup_steps": 2, "decay_steps": 6} | options
    with pytest.raises(ValueError, match=message):
        LearnerConfig.model_validate(options)


def test_a_batch_whose_tokens_are_all_masked_has_trained_nothing(model_dir: Path) -> None:
    learner = make_learner(model_dir, warmup_steps=0)
    groups, advantages = make_batch(0)
    assert train_step(learner, groups, advantages)["batch/trained_share"] == 1.0
    for group in groups:
        group.mask = np.zeros_like(group.mask)
    assert train_step(learner, groups, advantages)["batch/trained_share"] == 0.0


OWN = "tests.consumer.grpo.learner.own_objective"


def test_an_objective_of_the_user_gets_groups_of_equal_rewards_too(model_dir: Path) -> None:
    groups, advantages = make_batch(1)
    for objective, is_whole in (("ppo", False), (f"{OWN}:likelihood", True)):
        learner = make_learner(model_dir, loss={"objective": objective})
        metrics = train_step(learner, groups, np.zeros_like(advantages))
        assert (metrics["optim/grad_norm"] > 0) == is_whole
        assert metrics["batch/trained_share"] == float(is_whole)


def test_a_learner_trains_with_an_objective_of_the_user(model_dir: Path) -> None:
    groups, advantages = make_batch(1)
    trained = []
    # REINFORCE has the gradient of PPO in the first update of a batch, where no ratio is clipped
    for objective in ("ppo", f"{OWN}:reinforce"):
        learner = make_learner(model_dir, loss={"objective": objective}, old_policy="current")
        train_step(learner, groups, advantages)
        trained.append(weights(learner))
    before = weights(make_learner(model_dir))
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], msg=name)
    assert any(not torch.equal(before[name], value) for name, value in trained[1].items())


@pytest.mark.parametrize("name", ["of_the_batch", "nothing", "counts"])
def test_an_objective_that_returns_no_loss_for_each_token_is_named(
    model_dir: Path, name: str
) -> None:
    learner = make_learner(model_dir, loss={"objective": f"{OWN}:{name}"})
    with pytest.raises(ConfigError, match=rf"\[learner.loss\] objective = {OWN}:{name} returned"):
        train_step(learner, *make_batch(1))


def test_a_learner_refuses_an_objective_that_its_module_does_not_have(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        make_learner(model_dir, loss={"objective": f"{OWN}:missing"})


def test_weight_decay_leaves_norms_and_biases_alone(model_dir: Path) -> None:
    plain = make_learner(model_dir)
    decayed = make_learner(model_dir, weight_decay=0.5)
    for learner in (plain, decayed):
        train_step(learner, *make_batch(0))
    for name, tensor in plain.policy.parameters.items():
        assert torch.equal(tensor, decayed.policy.parameters[name]) == (tensor.ndim == 1), name


def test_the_learning_rate_is_scheduled_by_train_steps(model_dir: Path) -> None:
    """A train step may have several optimizer steps."""
    learner = make_learner(
        model_dir,
        learning_rate=1.0,
        warmup_steps=2,
        decay_steps=4,
        final_rate=0.5,
        updates_per_batch=3,
    )
    rates = [train_step(learner, *make_batch(step))["optim/learning_rate"] for step in range(5)]
    assert rates == pytest.approx([(1 + 2 + 3) / 18, (4 + 5 + 6) / 18, 11 / 12, 2 / 3, 0.5])


def test_learning_rate_falls_along_half_a_cosine(model_dir: Path) -> None:
    learner = make_learner(
        model_dir,
        learning_rate=1.0,
        warmup_steps=0,
        decay_steps=4,
        final_rate=0.0,
        schedule="cosine",
    )
    rates = []
    for learner.policy.step in range(6):
        rates.append(scheduled_rate(learner.policy.config, learner.policy.step))
    assert rates == pytest.approx([(1 + np.cos(np.pi * min(step, 4) / 4)) / 2 for step in range(6)])


def test_save_weights_writes_what_load_model_reads(model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(model_dir)
    train_step(learner, *make_batch(0))
    learner.policy.save_weights(tmp_path)
    loaded = dict(load_model(tmp_path).named_parameters())
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in weights(learner).items())
