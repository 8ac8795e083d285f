from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import OPTConfig, OPTForCausalLM

from buffer.errors import ConfigError, WireError
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import MediaRef, RolloutState
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.policy.logprobs import TargetLogits, token_logprobs
from consumer.grpo.policy.micro_batch import MicroBatch, Packer
from consumer.grpo.policy.model_checks import keeps_samples_apart
from consumer.grpo.policy.policy import Policy
from consumer.handle.batch import BatchTable
from tests.consumer.grpo.models.tiny import build_model, make_group
from tests.thoroughness import examples

SHAPES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=5)),
    min_size=1,
    max_size=5,
)


def make_groups(shapes: list[tuple[int, list[int]]]) -> list[RolloutGroup]:
    return [
        make_group(i, prompt=prompt, lengths=lengths) for i, (prompt, lengths) in enumerate(shapes)
    ]


def read_sample(
    batch: MicroBatch, sample: int
) -> tuple[list[int], list[int], list[float], list[float]]:
    """Prompt ids, response ids, logprobs and mask of one sample as the model will see them."""
    tokens = batch.sample == sample
    inputs = batch.input_ids.flatten()
    positions = batch.position_ids.flatten()
    predecessor = int(batch.logit_index[tokens][0])
    start = predecessor - int(positions[predecessor])
    behind = batch.logit_index[tokens] + 1
    assert inputs[behind].tolist() == batch.targets[tokens].tolist()
    length = predecessor + 1 - start + len(behind)
    assert positions[start : start + length].tolist() == list(range(length))
    return (
        inputs[start : predecessor + 1].tolist(),
        batch.targets[tokens].tolist(),
        batch.rollout_logprobs[tokens].tolist(),
        batch.mask[tokens].tolist(),
    )


def is_trained(state: RolloutState) -> bool:
    return len(state.response_ids) > 0 and (
        state.response_mask is None or bool(state.response_mask.any())
    )


@given(SHAPES, st.integers(1, 80))
def test_pack_keeps_every_trained_rollout_exactly_once(
    shapes: list[tuple[int, list[int]]], budget: int
) -> None:
    groups = make_groups(shapes)
    states = [state for group in groups for state in group.states]
    seen = []
    for batch in Packer(budget).pack_pad_dispatch(BatchTable.of(groups)):
        for sample, number in enumerate(batch.rollout.tolist()):
            state = states[number]
            mask = (
                np.ones(len(state.response_ids))
                if state.response_mask is None
                else state.response_mask
            )
            assert state.prompt_ids is not None
            assert read_sample(batch, sample) == (
                state.prompt_ids.tolist(),
                state.response_ids.tolist(),
                state.logprobs.tolist(),
                mask.tolist(),
            )
            assert batch.trained_tokens[sample] == mask.sum()
            seen.append(number)
    assert sorted(seen) == [n for n, state in enumerate(states) if is_trained(state)]


@given(SHAPES, st.integers(1, 80))
def test_pack_stays_within_the_budget_unless_one_sample_is_longer(
    shapes: list[tuple[int, list[int]]], budget: int
) -> None:
    groups = make_groups(shapes)
    for batch in Packer(budget).pack_pad_dispatch(BatchTable.of(groups)):
        rows, width = batch.input_ids.shape
        assert rows * width <= budget or rows == 1


def test_pack_puts_short_samples_into_one_row() -> None:
    group = make_group(0, prompt=2, lengths=[18, 3, 3, 3, 3])
    (batch,) = Packer(1000).pack_pad_dispatch(BatchTable.of([group]))
    assert batch.input_ids.shape == (2, 20)


def test_pack_leaves_out_what_is_not_kept() -> None:
    group = make_group(0)
    keep = np.array([False, True, False, True])
    (batch,) = Packer(1000).pack_pad_dispatch(BatchTable.of([group]), keep=keep)
    assert sorted(batch.rollout.tolist()) == [1, 3]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> TargetLogits:
    return TargetLogits(load_model(build_model(tmp_path_factory.mktemp("model"))).eval())


@settings(max_examples=examples(25), deadline=None)
@given(shapes=SHAPES, budget=st.integers(20, 200), data=st.data())
def test_another_sample_changes_nothing_wherever_it_was_packed(
    policy: TargetLogits, shapes: list[tuple[int, list[int]]], budget: int, data: st.DataObject
) -> None:
    """One rollout gets other tokens, prompt and all."""
    groups = make_groups(shapes)
    for batch in Packer(budget).pack_pad_dispatch(BatchTable.of(groups)):
        before = token_logprobs(policy, batch).logprobs
        changed = data.draw(st.integers(0, len(batch.rollout) - 1))
        inputs = batch.input_ids.flatten()
        positions = batch.position_ids.flatten()
        own = batch.logit_index[batch.sample == changed]
        start = int(own[0]) - int(positions[own[0]])
        inputs[start : int(own[-1]) + 2] = (inputs[start : int(own[-1]) + 2] + 7) % 90
        after = token_logprobs(
            policy, replace(batch, input_ids=inputs.view_as(batch.input_ids))
        ).logprobs
        others = batch.sample != changed
        torch.testing.assert_close(after[others], before[others], atol=1e-6, rtol=0)
        assert not torch.equal(after[~others], before[~others])


def without_prompt(group: RolloutGroup) -> RolloutGroup:
    states = []
    for state in group.states:
        assert state.prompt_ids is not None
        prompt = len(state.prompt_ids)
        mask = np.concatenate([np.zeros(prompt), np.asarray(state.response_mask)])
        whole = {
            "prompt_ids": np.empty(0, "<i4"),
            "response_ids": np.concatenate([state.prompt_ids, state.response_ids]),
            "logprobs": np.concatenate([np.zeros(prompt, "<f4"), state.logprobs]),
            "response_mask": mask.astype("u1"),
        }
        states.append(state.model_copy(update=whole))
    return RolloutGroup(group.gid, group.task, states)


@settings(max_examples=examples(25), deadline=None)
@given(shapes=SHAPES, budget=st.integers(1, 200))
def test_rollouts_without_a_common_prompt_train_as_those_with_one(
    policy: TargetLogits, shapes: list[tuple[int, list[int]]], budget: int
) -> None:
    def trained(groups: list[RolloutGroup]) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for batch in Packer(budget).pack_pad_dispatch(BatchTable.of(groups)):
            logprobs = token_logprobs(policy, batch).logprobs
            for sample, number in enumerate(batch.rollout.tolist()):
                own = (batch.sample == sample) & (batch.mask > 0)
                assert batch.trained_tokens[sample] == own.sum()
                found[number] = [*logprobs[own].tolist(), *batch.rollout_logprobs[own].tolist()]
        return found

    groups = [
        group
        for group in make_groups(shapes)
        if all(s.response_mask is not None for s in group.states)
    ]
    expected = trained(groups)
    moved = trained([without_prompt(group) for group in groups])
    assert moved.keys() == expected.keys()
    for number, values in expected.items():
        assert moved[number] == pytest.approx(values, abs=2e-5)


def test_a_model_that_mixes_samples_of_a_row_is_found_out_and_gets_one_in_each(
    tmp_path: Path, policy: TargetLogits, caplog: pytest.LogCaptureFixture
) -> None:
    """OPT's attention does not see that positions start again."""
    assert keeps_samples_apart(policy)
    shape = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    torch.manual_seed(0)
    model = OPTForCausalLM(
        OPTConfig(vocab_size=128, num_hidden_layers=2, num_attention_heads=2, **shape)
    )
    model.save_pretrained(tmp_path)
    learner = Policy(tmp_path, LearnerConfig(token_budget=200))
    assert "OPTForCausalLM crosses samples" in caplog.text
    groups = make_groups([(7, [9, 2, 1]), (3, [2, 0, 4])])
    (update,) = TrainController(learner).pack(groups).updates
    assert all(len(batch.rollout) == len(batch.input_ids) for batch in update.batches)
    (mixed,) = Packer(200).pack_pad_dispatch(BatchTable.of(groups))
    assert len(mixed.rollout) > len(mixed.input_ids), (
        "no row would hold two samples: this would test nothing"
    )
    alone = {
        int(b.rollout[0]): learner.logprobs(b)
        for b in Packer(1).pack_pad_dispatch(BatchTable.of(groups))
    }
    for batch in update.batches:
        together = learner.logprobs(batch)
        for sample, rollout in enumerate(batch.rollout.tolist()):
            torch.testing.assert_close(
                together[batch.sample == sample], alone[rollout], atol=2e-5, rtol=1e-4
            )


def test_unused_slots_are_not_seen_when_rows_hold_one_sample(tmp_path: Path) -> None:
    model = load_model(build_model(tmp_path)).eval()
    group = make_group(0, prompt=6, lengths=[5, 4])
    (batch,) = Packer(1000).pack_pad_dispatch(BatchTable.of([group]))
    assert batch.input_ids.shape == (2, 11)
    before = token_logprobs(TargetLogits(model), batch).logprobs
    batch.input_ids[1, -1] = 77
    assert torch.equal(before, token_logprobs(TargetLogits(model), batch).logprobs)


def test_pack_refuses_a_group_without_prompt_ids() -> None:
    group = make_group(0)
    group.columns["prompt_ids"] = np.empty(0, np.int32)
    with pytest.raises(WireError, match="no prompt ids"):
        Packer(100).pack_pad_dispatch(BatchTable.of([group]))


def test_pack_refuses_columns_that_disagree() -> None:
    group = make_group(0)
    group.columns["logprobs"] = group.logprobs[:-1]
    with pytest.raises(WireError, match="logprobs"):
        Packer(100).pack_pad_dispatch(BatchTable.of([group]))


def test_packer_refuses_an_empty_budget() -> None:
    with pytest.raises(ConfigError, match="token_budget"):
        Packer(0)


def test_packer_refuses_a_prompt_that_shows_images() -> None:
    group = make_group(0, prompt=3, lengths=[2])
    group.shared.multimodal = [MediaRef("image", "images/0.png", tokens=2)]
    with pytest.raises(ConfigError, match="contains images: token ids alone are another prompt"):
        Packer(100).pack_pad_dispatch(BatchTable.of([group]))
