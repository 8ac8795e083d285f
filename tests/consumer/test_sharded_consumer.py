"""A data-parallel trainer of two processes: whole steps, balanced shares, and one that dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.run import Run
from consumer.batches.batch import Batch
from consumer.batches.torch_dataset import BatchDataset, padded_tensors
from consumer.ranks import balanced_shares
from tests.consumer.conftest import Trainers
from tests.consumer.crew import at_work, wait_until
from tests.consumer.models.tiny import make_group
from tests.consumer.sharded_trainer import KILLED, RANKS
from tests.servers import Server

ROOT = Path(__file__).parents[2]


def run_ranks(url: str, run: Run, folder: Path, *lives: dict[str, int]) -> list[list[int]]:
    """How each rank of each life ended."""
    order = {"url": url, "run": run.name, "folder": str(folder), "lives": lives}
    command = [sys.executable, "-m", "tests.consumer.sharded_trainer", orjson.dumps(order).decode()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr.decode()
    ends: list[list[int]] = orjson.loads(done.stdout)
    return ends


def read(folder: Path, life: int, step: int) -> list[dict[str, Any]]:
    return [
        orjson.loads((folder / str(life) / f"{step}-{rank}.json").read_bytes())
        for rank in range(RANKS)
    ]


def check_step(parts: list[dict[str, Any]]) -> None:
    """Every group on one rank, and both hold the same manifest."""
    assert parts[0]["manifest"] == parts[1]["manifest"]
    assert sorted(parts[0]["gids"] + parts[1]["gids"]) == sorted(parts[0]["manifest"])
    assert abs(parts[0]["tokens"] - parts[1]["tokens"]) <= 20  # a group has at most 4 x 5


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_ranks_share_whole_steps_and_one_that_dies_fails_the_step_for_all(
    server: Server, run: Run, tmp_path: Path
) -> None:
    with at_work(run, math=17):
        wait_until(lambda: run.buffer.count("math") == 17, "all groups")
    bad = run.buffer.peek(6, "math")[5].gid  # of the second step
    run.store.control.set(run.keys.payload(bad, run.record(bad)["payload"]), b"nonsense")

    ends = run_ranks(
        server.url, run, tmp_path, {"first": 1, "last": 4, "die_at": 3}, {"first": 3, "last": 4}
    )
    assert ends[0][1] == KILLED
    assert ends[0][0] not in (0, KILLED)  # it noticed, and did not continue alone
    assert ends[1] == [0, 0]
    steps = [read(tmp_path, 0, step) for step in (1, 2, 3)] + [read(tmp_path, 1, 4)]
    assert read(tmp_path, 1, 3) == steps[2]
    for parts in steps:
        check_step(parts)
    trained = [gid for parts in steps for gid in parts[0]["manifest"]]
    assert len(set(trained)) == len(trained) == 16
    assert bad not in trained
    assert "WireError" in run.dead_letters.reason(bad)["reason"]
    assert run.ledger.steps() == (4, 4, 4)
    assert run.account.fsck().clean


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
    from consumer.batches import torch_dataset as batch_dataset

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
