from __future__ import annotations

from pathlib import Path

from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.run_owner import LOCK_FILE
from tests.rolloutmq.conftest import in_process


def test_an_evaluation_ends_the_server_that_a_killed_one_left(tmp_path: Path) -> None:
    checkpoint = tmp_path / "mine" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text("{}")
    left = EmbeddedServer(tmp_path / "mine-eval" / "server")
    left.start()
    (tmp_path / "mine-eval" / LOCK_FILE).touch()
    try:
        done = in_process("eval", "demo", "1", "--set", f"run.dir={tmp_path / 'mine'}")
        assert done.returncode, "the checkpoint is none"
        assert left.reap() is not None
    finally:
        left.kill()
