from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer.errors import ModelError, RolloutMQError
from consumer.grpo.model_state.saved_state import Rows, SavedState, write_state
from consumer.handle.checkpoint import check_state
from consumer.handle.ranks import Ranks
from tests.thoroughness import examples

SHAPES = {"a": (7, 3), "b": (1,), "c": (16, 2, 2), "e": (3,)}


class Rank(Ranks):
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


def rows_of(rank: int, size: int, sharded: frozenset[str]) -> dict[str, Rows]:
    rows = {}
    for name in sharded:
        total = SHAPES[name][0]
        each = -(-total // size)
        first = min(rank * each, total)
        rows[name] = Rows(first, min(each, total - first), total)
    return rows


def write(folder: Path, size: int, sharded: frozenset[str]) -> dict[str, torch.Tensor]:
    whole = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for rank in range(size):
        rows = rows_of(rank, size, sharded)
        own = {
            name: tensor[rows[name].first :][: rows[name].size] if name in rows else tensor
            for name, tensor in whole.items()
        } | {"rng": torch.tensor(rank), "step": torch.tensor(5)}
        write_state(folder, {n: t.contiguous() for n, t in own.items()}, rows, Rank(rank, size))
    return whole


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writers=st.integers(1, 5),
    readers=st.integers(1, 5),
    written=st.frozensets(st.sampled_from(sorted(SHAPES))),
    read=st.frozensets(st.sampled_from(sorted(SHAPES))),
)
def test_any_ranks_read_what_any_other_ranks_wrote(
    tmp_path_factory: pytest.TempPathFactory,
    writers: int,
    readers: int,
    written: frozenset[str],
    read: frozenset[str],
) -> None:
    folder = tmp_path_factory.mktemp("state")
    whole = write(folder, writers, written)
    check_state(folder)
    for rank in range(readers):
        rows = rows_of(rank, readers, read)
        with SavedState(folder, rows, rank) as state:
            assert set(state) == {*SHAPES, "rng", "step"}
            assert int(state["step"]) == 5
            assert int(state["rng"]) == (rank if rank < writers else 0)
            for name, tensor in whole.items():
                first, count, _ = rows.get(name, Rows(0, len(tensor), len(tensor)))
                assert torch.equal(state[name], tensor[first : first + count]), name


@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_torn_state_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 3, frozenset(SHAPES))
    file = tmp_path / "state-00001-of-00003.safetensors"
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else b"")
    for read in (check_state, SavedState):
        with pytest.raises(ModelError, match="state-00001-of-00003"):
            read(tmp_path)


def test_state_of_a_model_with_more_rows_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 2, frozenset({"a"}))
    with (
        SavedState(tmp_path, {"a": Rows(0, 4, 8)}) as state,
        pytest.raises(ModelError, match="the 8 rows"),
    ):
        state["a"]


def test_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    """Files may not grow, which the kernel refuses in the same place."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RolloutMQError, match="cannot be written") as caught:
            write_state(tmp_path, {"x": torch.zeros(1 << 20)}, {}, Ranks())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in caught.value.message
