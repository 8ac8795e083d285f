"""The log of a process of a run: bounded, with nothing lost that matters at its end."""

from __future__ import annotations

from pathlib import Path

from rolloutmq.launch.child import Child


def test_a_log_is_bounded_and_its_tail_is_found_after_a_cut(tmp_path: Path) -> None:
    file = tmp_path / "worker-0.log"
    child = Child("worker-0", [], file, {}, restarts=0, log_bytes=1000)
    child.limit_log()
    # as a process holds it: open for appending
    with file.open("a", buffering=1) as log:
        for n in range(1000):
            print(f"line {n}", file=log)
            child.limit_log()
            assert child.log_tail(2).splitlines()[-1] == f"line {n}"
    assert child.log_tail(2) == "line 998\nline 999"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 1000 + 20
