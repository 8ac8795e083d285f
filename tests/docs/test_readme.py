from __future__ import annotations

import re
from pathlib import Path

import pytest

from buffer.redis.server.embedded import EmbeddedServer
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
    log = (tmp_path / "runs" / "mine" / "logs" / "trainer.log").read_text(encoding="utf-8")
    assert re.findall(r"^step (\d): 8 rollouts", log, re.M) == [*"111122223333"]
