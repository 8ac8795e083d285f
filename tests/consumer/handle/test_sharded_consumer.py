from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.run.run import Run
from consumer.handle.batch import Batch
from consumer.handle.ranks import ALONE, RankOrders, balanced_shares, on_all_ranks
from consumer.handle.torch_dataset import BatchDataset, padded_tensors
from tests.consumer.conftest import Trainers
from tests.consumer.grpo.models.tiny import make_group
from tests.consumer.handle.crew import at_work


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_balanced_shares_hold_every_position_once_and_are_within_four_thirds(
    weights: list[int], ranks: int
) -> None:
    shares = balanced_shares(weights, ranks)
    assert len(shares) == ranks
    assert sorted(position for share in shares for position in share) == list(range(len(weights)))
    loads = [sum(weights[position] for position in share) for share in shares]
    best = max(max(weights, default=0), sum(weights) / ranks)
    assert max(loads) <= best + max(weights, default=0)
    assert max(loads) - min(loads) <= max(weights, default=0)


def test_dataset_gives_whole_steps_through_a_data_loader(run: Run, trainer: Trainers) -> None:
    from torch.utils.data import DataLoader

    consumer = trainer(run)
    with at_work(run, math=6):
        dataset = BatchDataset(consumer, lambda step: {"math": step}, first=1, last=3)
        sizes = [
            tuple(padded_tensors(batch)["scores"].shape)
            for batch in DataLoader(dataset, batch_size=None)
        ]
    assert sizes == [(4,), (8,), (12,)]
    assert len(dataset) == 3
    assert run.ledger.steps()[0] == 3


def test_dataset_refuses_to_take_in_a_worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from buffer.errors import ConfigError
    from consumer.handle import torch_dataset as batch_dataset

    monkeypatch.setattr(batch_dataset, "get_worker_info", lambda: object())
    with pytest.raises(ConfigError, match="num_workers=0"):
        next(iter(BatchDataset(None, {}, last=1)))  # type: ignore[arg-type]


def test_padded_rows_hold_every_token_where_it_belongs() -> None:
    groups = [make_group(1, prompt=3, lengths=(2, 0, 5)), make_group(2, prompt=6, lengths=(1, 4))]
    tensors = padded_tensors(Batch(1, groups, None, 0.0))  # type: ignore[arg-type]
    row = 0
    for number, group in enumerate(groups):
        for state in group.states:
            assert state.prompt_ids is not None
            length = int(tensors["attention_mask"][row].sum())
            start = len(state.prompt_ids)
            tokens = [*state.prompt_ids.tolist(), *state.response_ids.tolist()]
            mask = [0.0] * start + [float(m) for m in _mask(state)]
            assert tensors["input_ids"][row, :length].tolist() == tokens
            assert tensors["loss_mask"][row, :length].tolist() == mask
            assert tensors["logprobs"][row, start:length].tolist() == state.logprobs.tolist()
            assert not tensors["input_ids"][row, length:].any()
            assert tensors["group"][row] == number
            row += 1
    assert row == len(tensors["scores"]) == 5


def _mask(state: Any) -> list[int]:
    return (
        [1] * len(state.response_ids)
        if state.response_mask is None
        else state.response_mask.tolist()
    )


class Adder:
    def __init__(self, orders: RankOrders, name: str) -> None:
        self.orders = orders
        self.total = 0
        orders.add(name, self)

    @on_all_ranks
    def add(self, number: int) -> int:
        self.total += number
        return self.total


def test_two_followers_of_one_class_get_their_own_orders_and_a_name_is_used_once() -> None:
    orders = RankOrders(ALONE)
    one, two = Adder(orders, "one"), Adder(orders, "two")
    assert (one.add(1), two.add(5), one.add(1)) == (1, 5, 2)
    assert [orders.name_of(each) for each in (one, two)] == ["one", "two"]
    with pytest.raises(ValueError, match="'one' already"):
        Adder(orders, "one")
