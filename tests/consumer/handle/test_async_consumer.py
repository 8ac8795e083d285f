from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.run.run import Run
from buffer.wire import group_bytes
from consumer.handle.async_consumer import AsyncRolloutConsumer
from consumer.handle.batch import Batch, Stopped
from consumer.handle.ranks import ALONE, RankOrders, balanced_shares, on_all_ranks
from consumer.handle.torch_dataset import BatchDataset, padded_tensors
from consumer.handle.wait_rules import WaitReason
from tests.consumer.conftest import Trainers
from tests.consumer.grpo.models.tiny import make_group
from tests.consumer.handle.crew import at_work

GENEROUS_S = 400.0


def drive(run: Run, story: Callable[[AsyncRolloutConsumer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncRolloutConsumer(run) as consumer:
            await consumer.open()
            await asyncio.wait_for(story(consumer), GENEROUS_S)

    asyncio.run(main())


def test_a_cancelled_take_loses_nothing_and_the_loop_continues_meanwhile(run: Run) -> None:
    """Cancel the take again and again while groups are submitted.

    Sometimes that is just after the batch was recorded.
    """
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    async def story(consumer: AsyncRolloutConsumer) -> None:
        ticking = asyncio.create_task(tick())
        seen: list[str] = []
        with at_work(run, math=12) as crew:
            for step in range(1, 5):
                for patience_s in (0.001, 0.005, 0.02, 0.05, 0.1):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(consumer.take_batch(step, {"math": 13}), patience_s)
                batch = await consumer.take_batch(step, {"math": 3})
                again = await consumer.take_batch(step, {"math": 3})
                assert [group_bytes.encode(g) for g in again.groups] == [
                    group_bytes.encode(g) for g in batch.groups
                ]
                seen += batch.manifest.gids
                await consumer.commit(step, keep=step)
            assert crew.epochs
        ticking.cancel()
        assert len(seen) == len(set(seen)) == 12
        assert run.account.fsck().clean

    drive(run, story)
    assert turns > 20


def test_cancelling_between_record_and_answer_gives_the_same_batch_to_the_next_take(
    run: Run,
) -> None:
    async def story(consumer: AsyncRolloutConsumer) -> None:
        with at_work(run, math=3):
            recorded = asyncio.Event()
            original = run.ledger.take
            loop = asyncio.get_running_loop()

            def take(*args: object, **kwargs: object) -> object:
                answer = original(*args, **kwargs)  # type: ignore[arg-type]
                if run.ledger.steps()[0] == 1:
                    loop.call_soon_threadsafe(recorded.set)
                return answer

            run.ledger.take = take  # type: ignore[method-assign, assignment]
            taking = asyncio.create_task(consumer.take_batch(1, {"math": 3}))
            await recorded.wait()
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            run.ledger.take = original  # type: ignore[method-assign]
            batch = await consumer.take_batch(1, {"math": 99})
            assert sorted(batch.manifest.gids) == [f"math-{draw:010d}" for draw in range(3)]

    drive(run, story)


def test_a_commit_goes_through_while_a_batch_is_awaited(run: Run) -> None:
    async def story(consumer: AsyncRolloutConsumer) -> None:
        with at_work(run, math=2):
            await consumer.take_batch(1, {"math": 2})
            waiting = asyncio.create_task(consumer.take_batch(2, {"math": 2}))
            await consumer.commit(1, keep=1)
            assert run.ledger.steps() == (1, 1, 1)
            assert not waiting.done()
            consumer.stop()
            with pytest.raises(Stopped):
                await waiting

    drive(run, story)


def test_a_wait_reports_what_is_missing_and_who_could_generate_it(run: Run) -> None:
    reasons: list[WaitReason] = []

    async def story(consumer: AsyncRolloutConsumer) -> None:
        with pytest.raises(
            TimeoutError, match=r"math 0 of 3; of math, 0 wait and 0 run; there is no live worker$"
        ):
            await consumer.take_batch(1, {"math": 3}, deadline_s=0.05)
        taking = asyncio.create_task(consumer.take_batch(1, {"math": 3}, waiting=reasons.append))
        while not reasons:
            await asyncio.sleep(0.001)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        await consumer.pause("keep")
        with pytest.raises(TimeoutError, match="the run is paused"):
            await consumer.take_batch(1, {"math": 3}, deadline_s=0.05)
        names = [event[1] for _, event in await consumer.events()]
        assert names[:2] == ["created", "trainer_opened"]
        assert "control" in names

    drive(run, story)
    assert reasons[0].workers == 0
    assert reasons[0].started == {"math": (0, 0)}


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
