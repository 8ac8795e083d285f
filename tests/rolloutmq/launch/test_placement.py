from __future__ import annotations

import pytest

from buffer.errors import ConfigError
from rolloutmq.check.machine import Placement, count_gpus, place
from rolloutmq.config.config import LaunchSection

CASES = [
    # machine without GPUs: nobody gets any
    ({"workers": 2}, 0, 1, [], [[], []]),
    # workers elsewhere
    ({"workers": 0}, 0, 1, [], []),
    ({"workers": 0}, 1, 1, [0], []),
    ({"workers": 0, "colocated": True}, 1, 2, [0], []),
    # one GPU: only side by side
    ({"workers": 1, "colocated": True}, 1, 1, [0], [[0]]),
    ({"workers": 2, "colocated": True}, 1, 1, [0], [[0], [0]]),
    # eight: the trainer has the first one
    ({"workers": 7}, 8, 1, [0], [[1], [2], [3], [4], [5], [6], [7]]),
    ({"workers": 2}, 8, 1, [0], [[1], [2]]),
    ({"workers": 3}, 8, 2, [0], [[1, 2], [3, 4], [5, 6]]),
    ({"workers": 1, "trainer_gpus": [6, 7], "worker_gpus": [0, 1, 2, 3]}, 8, 4, [6, 7], [[0, 1, 2, 3]]),
    ({"workers": 2, "trainer_gpus": [4], "worker_gpus": [7, 6, 5, 3]}, 8, 2, [4], [[7, 6], [5, 3]]),
    ({"workers": 2, "colocated": True}, 8, 4, [0], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ({"workers": 3, "colocated": True, "worker_gpus": [0, 1]}, 2, 2, [0], [[0, 1], [0, 1], [0, 1]]),
]  # fmt: skip

ERRORS = [
    ({"workers": 1, "trainer_gpus": [0]}, 0, 1, "this machine has none"),
    ({"workers": 1, "worker_gpus": [0]}, 0, 1, "this machine has none"),
    ({"workers": 1}, 1, 1, "workers = 1 of 1 GPUs need 1, but 0 are left"),
    ({"workers": 8}, 8, 1, "need 8, but 7 are left"),
    ({"workers": 2}, 4, 2, "workers = 2 of 2 GPUs need 4, but 3 are left"),
    ({"workers": 1, "colocated": True}, 1, 2, "need 2, but 1 are left"),
    ({"workers": 1, "trainer_gpus": [1], "worker_gpus": [1, 2]}, 4, 1, r"use the same GPUs \[1\]"),
    ({"workers": 1, "worker_gpus": [4]}, 4, 1, r"names GPUs \[4\], but this machine has 0 to 3"),
    ({"workers": 2, "worker_gpus": [1, 1]}, 4, 1, "names a GPU twice"),
]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("launch", "gpus", "per_worker", "trainer", "workers"), CASES)
def test_place_deals_out_gpus(
    launch: dict[str, object],
    gpus: int,
    per_worker: int,
    trainer: list[int],
    workers: list[list[int]],
) -> None:
    placement = place(LaunchSection.model_validate(launch), gpus, per_worker)
    assert placement == Placement(trainer, workers)


@pytest.mark.parametrize(("launch", "gpus", "per_worker", "why"), ERRORS)
def test_place_says_why_it_cannot(
    launch: dict[str, object], gpus: int, per_worker: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        place(LaunchSection.model_validate(launch), gpus, per_worker)


def test_every_rank_of_the_trainer_gets_a_gpu() -> None:
    placement = place(LaunchSection(workers=2), 8, 2, ranks=4)
    assert placement == Placement([0, 1, 2, 3], [[4, 5], [6, 7]])


def test_only_the_gpus_that_this_process_was_given_are_dealt_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-1a2b,7")
    assert count_gpus() == 3
    placement = place(LaunchSection(workers=2), count_gpus())
    assert [Placement.environment(gpus) for gpus in (placement.trainer, *placement.workers)] == [
        {"CUDA_VISIBLE_DEVICES": name} for name in ("5", "GPU-1a2b", "7")
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0
