"""A project of `rolloutmq init` is run to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolloutmq.init.project import TINY, Choices, write_project
from tests.warm_process import run_to_end

CHANGES = ("plan.steps=1", "plan.batch_size=2", "tasks.math.sample.max_tokens=4")


@pytest.mark.slow
def test_a_new_project_runs_to_its_end(tmp_path: Path) -> None:
    project = tmp_path / "mine"
    write_project(project, Choices("math", TINY, None, 0))
    flags = [word for change in CHANGES for word in ("--set", change)]
    said = run_to_end(project, "run", "config.toml", *flags)
    assert "lost 0 · in two places 0 · trained twice 0" in said
