"""A shell completes names, and asks a server only where one answers at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq import completion
from rolloutmq.presets import preset_names
from tests.rolloutmq.conftest import in_process
from tests.rolloutmq.populate import Scene


def completed(line: str, cwd: Path) -> list[str]:
    """What a shell proposes for the last word of a line."""
    asking = {"_ROLLOUTMQ_COMPLETE": "complete_bash", "COMP_WORDS": line}
    done = in_process(cwd=cwd, **asking, COMP_CWORD=str(len(line.split(" ")) - 1))
    assert done.stderr == ""
    return done.stdout.split()


def test_presets_templates_and_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    assert completed("rolloutmq run ", tmp_path) == [*preset_names(), "mine.toml"]
    assert completed("rolloutmq check m", tmp_path) == ["mine.toml"]
    assert completed("rolloutmq init mine --template t", tmp_path) == ["tools"]
    assert completed("rolloutmq set max_st", tmp_path) == ["max_staleness="]
    assert completed("rolloutmq pause --mode d", tmp_path) == ["drain"]


def test_runs_tasks_and_workers_of_the_server(
    scene: Scene, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(completion, "PATIENCE_S", 400.0)
    where = f"--run-dir {server.folder}"
    workers = sorted(worker.id for worker in scene.run.fleet.workers())
    assert completed(f"rolloutmq ls {where} --run ", tmp_path) == [scene.run.name]
    assert completed(f"rolloutmq ls {where} --task m", tmp_path) == ["math"]
    assert sorted(completed(f"rolloutmq fence {where} ", tmp_path)) == workers
    assert "tasks.math.weight=" in completed(f"rolloutmq set {where} tasks.", tmp_path)


def test_a_server_that_does_not_answer_is_passed_over(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "runs" / "over") as over:
        pass
    for where in ("", "--redis-url redis://127.0.0.1:1 ", "--redis-url nonsense ", "--run-dir no "):
        assert completed(f"rolloutmq ls {where}--task ", tmp_path) == []
    assert not over.is_running
