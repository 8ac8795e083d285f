from __future__ import annotations

from pathlib import Path

import pytest

from buffer.redis.server.embedded import EmbeddedServer
from consumer.handle.step_log import StepLog
from tests.docs.test_pages import files_of_the_readme
from tests.warm_process import run_to_end


@pytest.mark.slow
def test_your_own_trainer_runs_as_printed(tmp_path: Path) -> None:
    for name, code in files_of_the_readme().items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    try:
        created = run_to_end(tmp_path, "create", "my_run.toml")
        assert not EmbeddedServer(tmp_path / "runs" / "mine" / "server").is_running
        printed = run_to_end(tmp_path, "run", "my_run.toml")
    finally:
        EmbeddedServer(tmp_path / "runs" / "mine" / "server").kill()
    assert "run      mine is ready to start" in created
    assert "rolloutmq producer my_run.toml" in created
    assert "lost 0 · in two stages 0 · trained twice 0" in printed
    log = StepLog(tmp_path / "runs" / "mine" / "steps.jsonl")
    log.read_new()
    assert [(step.step, len(step.gids)) for step in log.steps] == [(1, 4), (2, 4), (3, 4)]
    assert log.trained_twice() == {}
