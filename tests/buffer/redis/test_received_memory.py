from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from buffer.job import PayloadRef
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from tests.buffer.scene import Scene

TOKENS = 500_000
GROUPS = 33
"""A batch of 149 MB, in rounds of one group each."""

SLACK = 24_000_000

Numbers = NDArray[Any]

pytestmark = pytest.mark.without("memory", "redis", "cluster", reason="one socket is enough")


def numbers(n: int) -> Numbers:
    return np.arange(n, n + TOKENS, dtype="<i4")


def group(n: int) -> RolloutGroup:
    state = RolloutState(
        index=0,
        response_ids=numbers(n),
        logprobs=-numbers(n).astype("<f4"),
        response_mask=(np.arange(TOKENS) % 7 > 0).astype("u1"),
        spans=[VersionSpan(0, TOKENS, 0, "l0")],
        status=Status.COMPLETED,
    )
    return RolloutGroup(f"math-{n:010d}", "math", [state])


@pytest.fixture
def refs(scene: Scene) -> list[PayloadRef]:
    encoded = {n: group_bytes.encode(group(n)) for n in range(GROUPS)}
    return [scene.run.payloads.write(f"math-{n:010d}", "t", data) for n, data in encoded.items()]


def resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def test_a_batch_takes_its_bytes_and_what_is_kept_of_it_its_own_round(
    scene: Scene, refs: list[PayloadRef]
) -> None:
    payload = sum(ref.size for ref in refs)
    scene.run.buffer.read_many(refs)
    before = resident()
    groups = scene.run.buffer.read_many(refs)
    assert resident() - before < 1.1 * payload + SLACK
    kept = [each.response_ids for each in groups[::8]]
    del groups
    assert resident() - before < sum(ref.size for ref in refs[::8]) + SLACK
    del kept
    assert resident() - before < SLACK
