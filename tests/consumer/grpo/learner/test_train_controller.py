from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from buffer.control.length_counts import FINISHED
from buffer.errors import ConfigError
from buffer.wire.group import RolloutGroup
from consumer.config.critic import CriticConfig
from consumer.config.learner import LearnerConfig, LossConfig
from consumer.grpo.learner.batch_filter import BatchFilter
from consumer.grpo.learner.critic import Critic, value_loss
from consumer.grpo.learner.group_rewards import GroupRewards
from consumer.grpo.learner.train_controller import TrainController, read_columns
from consumer.grpo.policy.policy import Policy
from consumer.grpo.reporting.metrics import BatchColumns
from tests.consumer.grpo.learner import own_objective
from tests.consumer.grpo.learner.test_distillation import sampled_logprobs
from tests.consumer.grpo.models.tiny import make_group


def make_controller(model_dir: Path, *, critic: bool = False, **options: Any) -> TrainController:
    loss = LossConfig(**options.pop("loss", {}))
    learner = Policy(
        model_dir, LearnerConfig(learning_rate=1e-3, token_budget=40, loss=loss, **options), seed=7
    )
    config = CriticConfig(learning_rate=1e-2, lam=0.9, gamma=0.99)
    if critic:
        return TrainController(learner, "gae", critic=Critic(model_dir, config, learner, seed=3))
    return TrainController(learner)


def make_batch(step: int = 0) -> list[Any]:
    return [make_group(100 * step + i, prompt=3 + i) for i in range(3)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"updates_per_batch": 2, "old_policy": "current", "loss": {"kl_coef": 0.1, "entropy_coef": 0.01}},
        {"critic": True, "updates_per_batch": 2, "old_policy": "current"},
    ],
    ids=str,
)  # fmt: skip
def test_the_steps_one_by_one_are_fit_bit_for_bit(model_dir: Path, options: dict[str, Any]) -> None:
    whole = make_controller(model_dir, **options)
    pieces = make_controller(model_dir, **options)
    for step in range(2):
        expected = whole.fit(make_batch(step))
        batch = pieces.pack_pad_dispatch(make_batch(step))
        for compute in ("old_logprobs", "ref_logprobs", "values", "advantages"):
            batch = getattr(pieces, f"compute_{compute}")(batch)
        assert pieces.train(batch) == {
            n: v for n, v in expected.items() if not n.startswith("filtered/")
        }
    state = whole.state_tensors()
    assert all(torch.equal(tensor, state[name]) for name, tensor in pieces.state_tensors().items())


def test_critic_continues_exactly_after_save_and_load(model_dir: Path, tmp_path: Path) -> None:
    straight = make_controller(model_dir, critic=True)
    first = make_controller(model_dir, critic=True)
    straight.fit(make_batch(0))
    first.fit(make_batch(0))
    save_file(first.state_tensors(), tmp_path / "state.safetensors")
    second = make_controller(model_dir, critic=True)
    second.load_state_tensors(load_file(tmp_path / "state.safetensors"))
    assert second.fit(make_batch(1)) == straight.fit(make_batch(1))


def test_critic_learns_what_a_group_is_worth(model_dir: Path) -> None:
    controller = make_controller(model_dir, critic=True)
    groups = make_batch(0)
    errors = [controller.fit(groups)["critic/abs_error"] for _ in range(8)]
    assert errors[-1] < errors[0]


def test_the_learning_rate_of_a_critic_has_a_warm_up_of_its_own(model_dir: Path) -> None:
    moves = []
    for warmup_steps in (0, 4):
        policy = make_controller(model_dir).policy
        config = CriticConfig(learning_rate=1e-2, warmup_steps=warmup_steps)
        critic = Critic(model_dir, config, policy)
        controller = TrainController(policy, "gae", critic=critic)
        before = critic.parameters["head.bias"].detach().clone()
        controller.fit(make_batch())
        moves.append(float((critic.parameters["head.bias"] - before).detach().abs()))
    assert moves[1] == pytest.approx(moves[0] / 4, rel=1e-3)


def test_gradient_checkpointing_changes_no_number(model_dir: Path) -> None:
    plain = make_controller(model_dir, critic=True)
    again = make_controller(model_dir, critic=True, gradient_checkpointing=True)
    one = plain.fit(make_batch())
    two = again.fit(make_batch())
    assert two == pytest.approx(one, rel=1e-5, abs=1e-7)


def test_a_critic_in_bfloat16_keeps_float32_weights_and_nearly_its_numbers(model_dir: Path) -> None:
    plain = make_controller(model_dir, critic=True)
    short = make_controller(model_dir, critic=True, bf16=True)
    for _ in range(3):
        one = plain.fit(make_batch())
        two = short.fit(make_batch())
    assert short.critic
    assert {tensor.dtype for tensor in short.critic.parameters.values()} == {torch.float32}
    assert two["critic/loss"] != one["critic/loss"]
    assert two["critic/loss"] == pytest.approx(one["critic/loss"], rel=0.05)


def test_value_loss_equals_its_transcription() -> None:
    draw = np.random.default_rng(0)
    values, old, wanted, mask = draw.normal(size=(4, 50)).astype("<f4")
    mask = (mask > 0).astype("<f4")
    for clip in (None, 0.1, 0.5):
        expected = 0.0
        for v, o, r, m in zip(values, old, wanted, mask, strict=True):
            errors = [(v - r) ** 2]
            if clip is not None:
                errors.append((min(max(v, o - clip), o + clip) - r) ** 2)
            expected += 0.5 * max(errors) * m
        columns = [torch.from_numpy(column) for column in (values, old, wanted, mask)]
        got = value_loss(columns[0], columns[1], columns[2], columns[3], clip)
        assert float(got) == pytest.approx(expected, rel=1e-5)


OWN = "tests.consumer.grpo.learner.own_objective"


def with_token_rewards(groups: list[Any]) -> list[Any]:
    for group in groups:
        group.columns["token_rewards"] = np.linspace(-1, 1, len(group.mask), dtype="<f4")
    return groups


def test_advantages_of_the_user_are_per_rollout_or_per_token(model_dir: Path) -> None:
    learner = make_controller(model_dir).policy
    groups = with_token_rewards(make_batch())
    for name in ("by_token", "best_of"):
        controller = TrainController(learner, f"{OWN}:{name}")
        batch = controller.compute_advantages(controller.pack_pad_dispatch(groups))
        for update in batch.updates:
            for part, advantages in zip(update.batches, update.advantages, strict=True):
                expected = part.optional["token_rewards"]
                if name == "best_of":
                    scores = np.concatenate([g.scores - g.scores.max() for g in groups])
                    expected = torch.from_numpy(scores)[part.rollout][part.sample]
                assert torch.equal(advantages, expected)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("advantages", ["grpo", "turns", "reinforce_pp", f"{OWN}:by_token"])
def test_a_role_that_is_not_trained_changes_no_weight_and_no_divisor(
    model_dir: Path, advantages: str, aggregation: str
) -> None:
    alone, beside = (make_controller(model_dir, loss={"aggregation": aggregation}) for _ in "ab")
    groups = with_token_rewards(make_batch())
    others = []
    for group, other in zip(groups, with_token_rewards(make_batch(1)), strict=True):
        for state in other.states:
            state.role, state.response_mask = "other", np.zeros(len(state.response_ids), "u1")
            state.reward = {"score": 7.0 * state.index}
        mixed = [state for pair in zip(group.states, other.states, strict=True) for state in pair]
        for state in mixed:
            state.prompt_ids = group.prompt_ids
        others.append(RolloutGroup(group.gid, group.task, mixed))
    one = TrainController(alone.policy, advantages).fit(groups)
    two = TrainController(beside.policy, advantages).fit(others)
    assert two == one
    state = alone.state_tensors()
    assert all(torch.equal(tensor, state[name]) for name, tensor in beside.state_tensors().items())
    columns = BatchColumns.of(others, np.zeros(0, np.float32)).metrics()
    assert columns["rewards/mean/task/other"] == 10.5
    assert "rewards/mean/task/" not in columns


def test_a_function_of_the_user_is_called_once_for_a_batch(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may draw random numbers, or average over batches."""
    seen: list[int] = []

    def best_of(groups: Any) -> Any:
        seen.append(len(groups))
        return [group.scores - group.scores.max() for group in groups]

    monkeypatch.setattr(own_objective, "best_of", best_of)
    TrainController(make_controller(model_dir).policy, f"{OWN}:best_of").fit(make_batch())
    assert seen == [3]


def test_energies_are_the_squared_norms_of_the_logits_gradients(model_dir: Path) -> None:
    learner = make_controller(model_dir).policy
    groups = make_batch()
    controller = TrainController(learner, "otb")
    batch = controller.pack_pad_dispatch(groups)
    for update in batch.updates:
        update.batches.pad(len(update.batches) + 1)  # as beside a rank with more of them
    energies = controller.compute_energies(batch)
    for group, energy in zip(groups, energies, strict=True):
        token = 0
        for state in group.states:
            ids = torch.tensor([*state.prompt_ids, *state.response_ids])
            logits = learner.model(ids[None]).logits[0].detach().double()
            first = len(state.prompt_ids)
            for place in range(len(state.response_ids)):
                chances = logits[first + place - 1].softmax(-1)
                chances[ids[first + place]] -= 1
                expected = float(chances.square().sum()) * bool(group.mask[token])
                assert energy[token] == pytest.approx(expected, rel=1e-4, abs=1e-6)
                token += 1
    metrics = controller.fit(groups)
    assert metrics["optim/grad_norm"] > 0


def test_advantages_that_do_not_fit_the_groups_are_named(model_dir: Path) -> None:
    learner = make_controller(model_dir).policy
    with pytest.raises(ConfigError, match="missing"):
        TrainController(learner, f"{OWN}:missing")
    controller = TrainController(learner, f"{OWN}:too_few")
    with pytest.raises(ConfigError, match=f"{OWN}:too_few returned shape"):
        controller.fit(make_batch())


def test_other_ranks_get_the_same_rewards() -> None:
    group = with_token_rewards(make_batch())[0]
    group.columns["token_rewards"][2] = np.nan
    sent = GroupRewards.of(group)
    got = GroupRewards.of_lists(orjson.loads(orjson.dumps(sent.lists(with_tokens=True))))
    np.testing.assert_equal(dict(got.tokens), dict(sent.tokens))
    np.testing.assert_equal(dict(got.rewards), dict(sent.rewards))
    assert got.scores.tolist() == sent.scores.tolist()
    assert (list(got.sessions), got.lengths.tolist()) == (list(sent.sessions), [*sent.lengths])
    assert list(got.roles) == list(sent.roles) == [""] * 4


@pytest.mark.parametrize(
    ("advantages", "options", "column", "is_read"),
    [
        ("grpo", {}, "token_rewards", False),
        ("turns", {}, "token_rewards", True),
        ("gae", {}, "token_rewards", True),
        ("gae", {}, "values", False),
        ("turns", {}, "ref_logprobs", False),
        ("grpo", {"loss": {"objective": f"{OWN}:reinforce"}}, "ref_logprobs", True),
        (f"{OWN}:by_token", {}, "values", True),
        ("grpo", {}, "teacher_logprobs", False),
        ("grpo", {"distillation": {}}, "teacher_logprobs", True),
        ("grpo", {"loss": {"kl_coef": 1, "kl_reference": "big"}}, "teacher_logprobs", True),
        ("grpo", {"loss": {"kl_coef": 1, "kl_reference": "old"}}, "teacher_logprobs", False),
    ],
)
def test_a_column_that_nothing_reads_is_refused(
    advantages: str, options: dict[str, Any], column: str, is_read: bool
) -> None:
    groups = make_batch()
    values = np.zeros(len(groups[0].mask), "<f4")
    name = "teacher_logprobs/big" if column == "teacher_logprobs" else column
    groups[0].columns[name] = values
    learner = LearnerConfig.model_validate(options)
    chosen = BatchFilter(read_columns=read_columns(advantages, learner))
    filtered = chosen.apply(groups)
    assert len(filtered.groups) == 2 + is_read
    if not is_read:
        assert filtered.counts == {"unread_column": 1}
        with pytest.raises(ConfigError, match="token columns that the loss does not read"):
            chosen.apply(groups[:1])


def test_gae_without_a_critic_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="needs a critic"):
        TrainController(make_controller(model_dir).policy, "gae")


def test_each_rollout_has_the_reason_that_kept_it_from_a_gradient(model_dir: Path) -> None:
    def batch() -> list[RolloutGroup]:
        overlong = make_group(0, prompt=4, lengths=(3, 9, 2, 4))
        truncated, equal, roles, unscored = (make_group(n).states for n in range(1, 5))
        truncated[1].finish_reason = "length"
        for state in equal:
            state.reward = {"score": 1.0}
        roles[3].role, roles[3].response_mask = "other", np.zeros(4, "u1")
        unscored[2].reward = None
        stale = make_group(5)
        stale.mask = np.where(np.arange(13) < 3, 0, 1).astype(
            "u1"
        )  # as for tokens that are too old
        made = [
            RolloutGroup(f"t-{n:010d}", "t", s)
            for n, s in enumerate((truncated, equal, roles, unscored))
        ]
        return [overlong, *made, stale]

    learner = make_controller(model_dir).policy
    controller = TrainController(learner, batch_filter=BatchFilter(12, mask_truncated=True))
    controller.fit(batch())
    yes = FINISHED
    assert controller.fates == [
        *(yes, "overlong", yes, yes), *(yes, "truncated", yes, yes), *["no_advantage"] * 4,
        *(yes, yes, yes, ""), *["missing_reward"] * 4, *("stale", yes, yes, yes),
    ]  # fmt: skip
    columns = BatchColumns.of(batch(), controller.advantages, controller.fates)
    assert columns.lengths_by_fate()["task", "overlong"] == [9]
    assert columns.lengths_by_fate()["t", "truncated"] == [5]
    # the KL to a reference has a gradient where the advantage has none
    learner = make_controller(model_dir, loss={"kl_coef": 0.1}).policy
    with_kl = TrainController(learner, batch_filter=BatchFilter(12, mask_truncated=True))
    with_kl.fit(batch())
    assert "no_advantage" not in with_kl.fates


def test_scores_of_some_groups_are_those_of_the_pass_that_trained_them(model_dir: Path) -> None:
    gids = [group.gid for group in make_batch()]
    taken = []
    for asked in (gids, gids[1:2], []):
        controller = make_controller(model_dir, updates_per_batch=2, old_policy="current")
        controller.fit(make_batch())
        taken.append(controller.take_scores(asked))
    whole, one, none = taken
    assert ([*whole], [*one], [*none]) == (gids, gids[1:2], [])
    for name, values in one[gids[1]].items():
        assert np.array_equal(values, whole[gids[1]][name], equal_nan=True), name
    for group in make_batch()[:2]:  # of the first update, which has the weights of before
        trainer, entropy = whole[group.gid]["trainer"], whole[group.gid]["entropy"]
        expected = sampled_logprobs(make_controller(model_dir).policy, group)
        known = np.isfinite(trainer)
        assert known.any()
        assert np.array_equal(known, np.isfinite(entropy))
        assert np.allclose(trainer[known], expected[known], atol=1e-4)
