from __future__ import annotations

from buffer.groups.job_queue import Serves, serving_order
from buffer.limits import RunLimits, TaskLimits

LIMITS = RunLimits(
    tasks={"sums": TaskLimits(), "code": TaskLimits(), "exam": TaskLimits(eval_of="sums")}
)


def test_a_worker_of_a_mixed_fleet_is_served_its_own_lines_only() -> None:
    assert serving_order(
        LIMITS, Serves(frozenset({"exam", "code"}), frozenset({"eval", "fresh"}))
    ) == [("exam", "eval"), ("code", "fresh")]
    assert set(serving_order(LIMITS, Serves(frozenset({"sums"})))) == {
        ("sums", "resume"),
        ("sums", "fresh"),
    }
    assert len(serving_order(LIMITS)) == 5
