from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from buffer.errors import ConfigError
from buffer.maintenance.column_files import NO_FILES, ColumnFolder
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status
from buffer.wire.sampling import SampleParams
from buffer.wire.sampling_mask import SamplingMask
from consumer.config.learner import LearnerConfig, LoraConfig
from consumer.grpo.learner.batch_filter import BatchFilter
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy import vocabulary_projection
from consumer.grpo.policy.policy import Policy
from consumer.grpo.policy.vocabulary_projection import LogitTransform, SampledFrom, project
from producer_workers.config.engine import TransformersConfig
from producer_workers.engines import build_engine
from tests.consumer.grpo.models.tiny import train_step
from tests.producer_workers.engines.tiny_model import write_tiny_model
from tests.thoroughness import examples

ADVANTAGES = np.array([1.0, -1.0, 0.5, -0.5], np.float32)
LENGTHS = (30, 9, 17, 24)
HALF = SampleParams(top_p=0.5)


# -- the projection ----------------------------------------------------------


def dense(
    states: Tensor, head: nn.Linear, sets: list[list[int]], transform: LogitTransform
) -> list[Tensor]:
    """The distribution of each token over its own set (empty: all words), one after the other."""
    logits = head(states) * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    whole = list(range(head.out_features))
    return [
        torch.log_softmax(row[own or whole] / transform.temperature, -1)
        for row, own in zip(logits, sets, strict=True)
    ]


def _of_others(row: Tensor, own: list[int], others: Tensor) -> Tensor:
    places = [own.index(n) if n in own else n if not own else -1 for n in others.tolist()]
    outside = 0 * row.sum() - torch.inf  # with a gradient, of 0
    return torch.stack([outside if place < 0 else row[place] for place in places])


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    rows=st.integers(1, 13),
    transform=st.builds(
        LogitTransform,
        scale=st.sampled_from([1.0, 0.25]),
        cap=st.sampled_from([None, 1.5]),
        temperature=st.sampled_from([1.0, 0.6]),
    ),
)
def test_values_and_gradients_are_those_of_a_softmax_over_each_set(
    seed: int, sizes: list[int], rows: int, transform: LogitTransform
) -> None:
    torch.manual_seed(seed)
    words, count = 9, len(sizes)
    head = nn.Linear(8, words)
    nn.init.normal_(head.weight, std=2.0)
    states = (3 * torch.randn(count, 8)).requires_grad_()
    sets = [sorted(torch.randperm(words)[:size].tolist()) for size in sizes]
    own = [int(torch.randint(len(kept) or words, ())) for kept in sets]
    targets = torch.tensor([kept[n] if kept else n for kept, n in zip(sets, own, strict=True)])
    other = torch.randint(words, (count, 2))  # further tokens: -inf where they could not be sampled
    given = torch.randn(count), torch.randn(count), torch.randn(count, 2)
    inputs = [states, *head.parameters()]

    exact = nn.Linear(8, words).double()
    exact.load_state_dict(head.state_dict())
    exact_states = states.detach().double().requires_grad_()
    rows_of = dense(exact_states, exact, sets, transform)
    expected = (
        torch.stack([row[n] for row, n in zip(rows_of, own, strict=True)]),
        torch.stack([-(row.exp() * row).sum() for row in rows_of]),
        torch.stack([_of_others(*each) for each in zip(rows_of, sets, other, strict=True)]),
    )
    wanted = torch.autograd.grad(expected, [exact_states, *exact.parameters()], given)

    ids = torch.tensor([word for kept in sets for word in kept], dtype=torch.long)
    starts = np.append(0, np.cumsum(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_projection, "CHUNK_BYTES", 4 * words * rows)
        sampled_from = SampledFrom(torch.tensor(sizes), ids, starts)
        found = project(
            states,
            head,
            targets,
            transform,
            collision=True,
            others=other,
            sampled_from=sampled_from,
        )
        assert found.others is not None
        values = (found.logprobs, found.entropy, found.others)
        gradients = torch.autograd.grad(values, inputs, given)
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4, check_dtype=False)
    collision = torch.stack([row.exp().square().sum() for row in rows_of])
    torch.testing.assert_close(found.collision, collision, atol=1e-4, rtol=1e-4, check_dtype=False)
    torch.testing.assert_close(gradients, wanted, atol=1e-3, rtol=1e-3, check_dtype=False)


# -- from the engine to the trainer -------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def group(model: Path) -> RolloutGroup:
    return asyncio.run(roll_out(model, HALF))


async def roll_out(folder: Path, params: SampleParams, pauses: int = 0) -> RolloutGroup:
    """Sample a group with the real engine; each response is interrupted `pauses` times."""
    config = TransformersConfig(sampling_mask=True)
    engine = build_engine(config, folder, PolicyVersion("main", 0))
    await engine.start()
    prompt, states = np.array([40, 41, 42, 43, 44], np.int32), []
    for index, length in enumerate(LENGTHS):
        state = RolloutState(
            index=index,
            prompt_ids=prompt,
            sample_params=params,
            reward={"score": float(index % 2)},
            status=Status.COMPLETED,
        )
        own = SampleParams(**{**params.given(), "max_tokens": length, "seed": index})
        for left in range(pauses, -1, -1):
            rest = own.after(len(state.response_ids))
            if not rest.max_tokens:
                break
            tokens = np.concatenate([prompt, state.response_ids])
            asked = asyncio.create_task(engine.generate(str(index), tokens, rest))
            if left:
                await asyncio.sleep(0.01)
                await engine.pause("abort")
                await engine.resume()
            made = await asked
            state.append(
                made.token_ids, made.logprobs, made.spans, sampling_mask=made.sampling_mask
            )
            if made.finish_reason == "stop":
                break
        states.append(state)
    await engine.shutdown()
    return RolloutGroup("math-0000000001", "math", states)


def learner(folder: Path, *, columns: ColumnFolder = NO_FILES, **options: Any) -> Policy:
    return Policy(folder, LearnerConfig(**{"learning_rate": 1e-3, **options}), columns=columns)


def mismatch(trainer: Policy, group: RolloutGroup) -> float:
    """The mean distance of the logprobs of trainer and engine, whose weights are the same."""
    return train_step(trainer, [group], ADVANTAGES)["mismatch/abs_logprob"]


def without_masks(group: RolloutGroup) -> RolloutGroup:
    states = [state.model_copy(update={"sampling_mask": None}) for state in group.states]
    return group.continued(states)


@pytest.mark.parametrize(
    ("params", "least"),
    [
        (HALF, 0.4),  # 0.48 nats: on average, 38 % of the mass is cut off
        (SampleParams(top_k=4), 0.4),
        (SampleParams(min_p=0.3), 0.4),
        (SampleParams(top_p=0.6, top_k=20, temperature=0.7), 0.2),
        (SampleParams(min_tokens=30), 5e-4),
    ],
    ids=str,
)
def test_trainer_and_engine_agree_with_the_mask_and_not_without(
    model: Path, params: SampleParams, least: float
) -> None:
    group = asyncio.run(roll_out(model, params))
    options: dict[str, Any] = {"temperature": params.temperature, "allow_truncated_sampling": True}
    together = mismatch(learner(model, **options), group)
    apart = mismatch(learner(model, **options), without_masks(group))
    assert together < 1e-5
    assert apart > least


def test_interrupted_rollouts_keep_the_sets_of_all_their_tokens(model: Path) -> None:
    group = asyncio.run(roll_out(model, HALF, pauses=3))
    assert (group.columns["sampling_mask/counts"] > 0).all()
    assert mismatch(learner(model), group) < 1e-5


def test_rows_that_are_shared_and_adapters_change_nothing(
    model: Path, group: RolloutGroup, tmp_path: Path
) -> None:
    alone, shared = learner(model, token_budget=36), learner(model, token_budget=4096)
    found = [train_step(trainer, [group], ADVANTAGES) for trainer in (alone, shared)]
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-6)
    for name, weight in alone.parameters.items():
        torch.testing.assert_close(weight, shared.parameters[name], rtol=1e-3, atol=1e-4)
    adapted = learner(model, lora=LoraConfig(rank=4, alpha=8), loss={"kl_coef": 0.1})
    metrics = train_step(adapted, [group], ADVANTAGES)
    assert metrics["mismatch/abs_logprob"] < 1e-5
    assert abs(metrics["policy/kl_ref"]) < 1e-5  # the reference is of the same sets


def test_masks_in_files_train_as_those_in_columns(
    model: Path, group: RolloutGroup, tmp_path: Path
) -> None:
    columns = ColumnFolder(tmp_path / "columns")
    filed, inline = learner(model, columns=columns), learner(model)
    states = [state.model_copy() for state in group.states]
    for state in states[::2]:
        assert isinstance(state.sampling_mask, SamplingMask)
        name = f"{state.index}.npy"
        state.sampling_mask = columns.put(group.gid, name, state.sampling_mask.packed())
    mixed = group.continued(states)
    assert train_step(filed, [mixed], ADVANTAGES) == train_step(inline, [group], ADVANTAGES)
    for name, weight in inline.parameters.items():
        assert torch.equal(weight, filed.parameters[name]), name


def hostile(group: RolloutGroup, columns: ColumnFolder, column: Any) -> RolloutGroup:
    states = [state.model_copy() for state in group.states]
    states[0].sampling_mask = columns.put(group.gid, "bad.npy", np.array(column))
    return group.continued(states)


def test_files_that_are_no_mask_of_the_rollout_leave_its_group_out(
    model: Path, group: RolloutGroup, tmp_path: Path
) -> None:
    columns = ColumnFolder(tmp_path / "columns")
    first = group.states[0]
    assert isinstance(first.sampling_mask, SamplingMask)
    good = first.sampling_mask.packed()
    tokens = int(good[0])
    missing, beyond, decreasing = good.copy(), good.copy(), good.copy()
    missing[1 + tokens :] = (good[1 + tokens :] + 1) % 300
    beyond[-1] = 320
    decreasing[1] = -1
    other = good.astype("<i8")
    trainer = learner(model, columns=columns)
    fine = BatchFilter(readers=trainer.readers)
    assert fine.apply([hostile(group, columns, good)]).counts == {}
    for column in (missing, beyond, decreasing, good[:-1], good[:5], good[:0], other):
        found = hostile(group, columns, column)
        assert fine.apply([found, group]).counts == {"sampling_mask": 1}
        with pytest.raises(ConfigError, match="no group"):
            fine.apply([found])
    nowhere = hostile(group, columns, good)
    assert BatchFilter().apply([nowhere, group]).counts == {"sampling_mask": 1}


def test_a_file_with_one_id_changed_is_no_mask_of_its_group(
    model: Path, group: RolloutGroup, tmp_path: Path
) -> None:
    columns = ColumnFolder(tmp_path / "columns")
    filters = BatchFilter(readers=learner(model, columns=columns).readers)
    mask = group.states[0].sampling_mask
    assert isinstance(mask, SamplingMask)
    named = hostile(group, columns, mask.packed())
    assert filters.apply([named]).counts == {}
    sampled = set(group.states[0].response_ids.tolist())
    changed = mask.packed()
    other = next(n for n, token in enumerate(mask.ids.tolist()) if token not in sampled)
    changed[1 + len(mask.counts) + other] ^= 1
    hostile(group, columns, changed)  # the same name: still a mask, of the same tokens
    assert filters.apply([named, group]).counts == {"sampling_mask": 1}


def test_a_group_that_was_cut_and_has_no_mask_is_trained_only_if_that_is_allowed(
    model: Path, group: RolloutGroup
) -> None:
    bare = without_masks(group)
    metrics = TrainController(learner(model)).fit([group, bare])
    assert metrics["filtered/sampling_mask"] == 1
    allowed = learner(model, allow_truncated_sampling=True)
    assert TrainController(allowed).fit([bare])["filtered/sampling_mask"] == 0
    masked = [state.model_copy() for state in bare.states]
    for state in masked:  # what is not trained needs none
        state.response_mask = np.zeros(len(state.response_ids), "u1")
    assert (
        BatchFilter(readers=learner(model).readers).apply([bare.continued(masked), group]).counts
        == {}
    )
