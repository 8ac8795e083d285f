"""What docs/pages/your_trainer.md says of a batch, by the example that it names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from buffer.ids import new_nonce
from buffer.ledger.position import Position
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from consumer.handle.rollout_consumer import RolloutConsumer
from examples.batch_columns import rows, rows_of_lines
from tests.servers import Server


def rollout(
    index: int, ids: list[int], mask: list[int] | None, spans: list[VersionSpan]
) -> RolloutState:
    return RolloutState(
        index=index,
        prompt_ids=[1, 2],
        response_ids=ids,
        logprobs=[-0.5] * len(ids),
        response_mask=mask,
        spans=spans,
        reward={"score": float(index)},
        status=Status.COMPLETED,
        finish_reason="stop",
        extra={"picture": b"\xff\x00"},
    )


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_batch_and_its_export_are_the_same_rows(
    server: Server, run_name: str, tmp_path: Path
) -> None:
    limits = RunLimits(steps=2, batch_size=2, stale_threshold=3, tasks={"math": TaskLimits()})
    run = Run.create(Store(server.url), run_name, new_nonce(), limits)
    # the second rollout read a token of a tool, and was continued with newer weights
    groups = [
        [
            rollout(0, [5, 6, 7], None, [VersionSpan(0, 3, version, "initial")]),
            rollout(
                1,
                [5, 9, 8],
                [1, 0, 1],
                [VersionSpan(0, 1, version, "initial"), VersionSpan(2, 1, 1, "initial")],
            ),
        ]
        for version in (0, 1)
    ]
    run.buffer.put("math", groups)
    consumer = RolloutConsumer(run)
    consumer.open(position=Position())
    exported = tmp_path / "groups.jsonl"
    run.export(exported)
    batches = [consumer.take_batch(step, {"math": 1}, deadline_s=10) for step in (1, 2)]
    found = [row for batch in batches for row in rows(batch)]
    with exported.open() as file:
        from_file = {(row.gid, row.score): row for row in rows_of_lines(file)}
    for row in found:
        other = from_file[row.gid, row.score]
        for name in ("input_ids", "trained", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(row, name), getattr(other, name), err_msg=name)
        assert other.staleness == 0, "for the step that was the next when it was exported"
    assert [row.staleness for row in found] == [0, 0, 1, 1]
    assert json.loads(exported.read_text().splitlines()[0])["extra"] == {"picture": "/wA="}
    tool = found[1]
    assert tool.input_ids.tolist() == [1, 2, 5, 9, 8]
    assert tool.trained.tolist() == [False, False, True, False, True]
    assert tool.versions.tolist() == [-1, -1, 0, -1, 1]
    consumer.commit(1, keep=1)
    consumer.close()
