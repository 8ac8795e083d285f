from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import sample
from benchmarks.peers.__main__ import Size, measured, put_and_take
from benchmarks.peers.peer import Row
from benchmarks.peers.redis_peers import Plain
from benchmarks.peers.table import table
from benchmarks.server import memory_server

SMALL = Size("small, 2 a call", sample.Shape(2, 8, 200), 4, 2)


def test_queues_that_are_not_installed_are_left_out_and_the_others_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = list(table(list(measured(1, [SMALL]))))
    left_out = capsys.readouterr().err
    for name in ("ours", "ours, durable", "SET x8, MGET x16", "PipelineRL's stream"):
        assert any(line.startswith(f"| {name} |") for line in lines)
    assert "TransferQueue is left out: ModuleNotFoundError" in left_out


def test_a_queue_that_returns_other_values_is_refused() -> None:
    class Lossy(Plain):
        def rows(self, taken: Any) -> Iterator[Row]:
            for row in super().rows(taken):
                yield row._replace(logprobs=row.logprobs.astype("f2"))

    with memory_server() as server, pytest.raises(AssertionError, match="other values"):
        put_and_take(Lossy(server), [[sample.group("math-0000000000", SMALL.shape)]])
