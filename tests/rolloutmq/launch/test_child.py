"""A process that ends is reported with the error of its log."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rolloutmq.launch.child import Child, ChildFailed


def ended(child: Child) -> str | None:
    for _ in range(600):
        if report := child.keep_alive():
            return report
        time.sleep(0.1)
    return None


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


def test_a_process_without_output_is_reported(tmp_path: Path) -> None:
    child = Child("producer", [], tmp_path / "p.log", {}, restarts=5)
    child.start()
    child.kill()
    assert "was killed by SIGKILL: (no output)" in (ended(child) or "")
