"""A process that ends is reported with the error of its log."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path

import pytest

from buffer.redis.connection.retry import Backoff
from rolloutmq.launch.child import Child, ChildFailed
from tests.waits import DEADLINE_S, until


def ended(child: Child) -> str:
    return until(lambda: child.keep_alive() or "", "the end of a process")


def test_a_report_has_the_error_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("error: of an earlier start\n", encoding="utf-8")
    child = Child("trainer", ["status", "--redis-url", "unix:///no.sock"], log, {}, restarts=5)
    child.start()
    assert ended(child) == (
        f"trainer ended with exit code 3: unix:///no.sock: there is no such socket; its log: {log}"
    )


def test_a_wrong_config_is_not_tried_again(tmp_path: Path) -> None:
    child = Child("worker-0", ["worker", "no.toml"], tmp_path / "w.log", {}, restarts=5)
    child.start()
    with pytest.raises(ChildFailed, match=r"no\.toml: there is no such file") as caught:
        ended(child)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("achieves", [False, True])
def test_lives_without_progress_end_with_the_cause_first_however_long_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, achieves: bool
) -> None:
    monkeypatch.setattr("rolloutmq.launch.child.EARLY_DEATH_S", 0.0, raising=False)
    monkeypatch.setattr("rolloutmq.launch.child.BACKOFF", Backoff(0.0, 0.0))
    steps = count(7)
    child = Child(
        "trainer", ["status", "--redis-url", "unix:///no.sock"], tmp_path / "trainer.log", {},
        restarts=5, mark=lambda _: next(steps) if achieves else 7,
    )  # fmt: skip
    child.start()
    reports: list[str | None] = []
    with pytest.raises(ChildFailed) as caught:
        reports.extend(iter(partial(ended, child), None))
    assert reports.count("trainer restarted") == (5 if achieves else 2)
    cause, how, *_ = caught.value.message.splitlines()
    assert cause == "unix:///no.sock: there is no such socket"
    assert (
        how == f"  trainer ended with exit code 3{'' if achieves else ', 3 times without progress'}"
    )


def test_a_process_without_output_is_reported(tmp_path: Path) -> None:
    child = Child("producer", [], tmp_path / "p.log", {}, restarts=5)
    child.start()
    child.kill()
    assert "was killed by SIGKILL: (no output)" in ended(child)


def test_a_process_that_saw_the_end_of_the_run_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.launch.child.RESTART_DELAY_S", 0.0)
    child = Child("producer", ["--version"], tmp_path / "p.log", {}, restarts=5)
    child.start()
    assert child.wait(DEADLINE_S)
    assert child.succeeded
    assert [child.keep_alive(is_over=True) for _ in range(3)] == [None] * 3
    assert child.keep_alive() is None  # continued since: it is started again after a pause
    assert child.keep_alive() == "producer restarted"
    child.kill()
    assert child.wait(DEADLINE_S)


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
