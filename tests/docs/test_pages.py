"""The pages of docs/: every block of "your own …" is executed as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomlkit

from buffer.redis.keys import SLOTS
from buffer.redis.server.embedded import EmbeddedServer
from consumer.handle.step_log import StepLog
from docs.reference import REFERENCES
from docs.reference.keys import key_reference
from rolloutmq.config.load import load_config
from tests.consumer.grpo.models.tiny import build_model
from tests.programs import files_of_git

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"
YOUR_OWN = ("your_data_set", "your_judge", "your_agent_loop", "your_trainer")
"""In this order they are one story, in one folder."""


class Block(NamedTuple):
    language: str
    file: str
    """the title, which names the file; "" for a change of my_run.toml, or a command"""
    code: str


def blocks(page: str) -> Iterator[Block]:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    for language, file, code in re.findall(
        r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', text, re.M | re.S
    ):
        yield Block(language, file, code)


def files_of_the_readme() -> dict[str, str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w+\n(# (my_[\w.]+)\n.*?)^```$", text, re.M | re.S)
    return {name: code for code, name in blocks}


def merge(into: Any, changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and key in into:
            merge(into[key], value)
        else:
            into[key] = value


class Reader:
    """Does in a folder what the pages say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""
        command = folder / "bin" / "rolloutmq"
        command.parent.mkdir()
        command.write_text(
            f'#!/bin/sh\nexec {sys.executable} -m rolloutmq "$@"\n', encoding="utf-8"
        )
        command.chmod(0o755)

    def follow(self, block: Block) -> None:
        if block.file:
            (self.folder / block.file).write_text(block.code, encoding="utf-8")
        elif block.language == "toml":
            file = self.folder / "my_run.toml"
            config = tomlkit.parse(file.read_text(encoding="utf-8"))
            merge(config, tomllib.loads(block.code))
            file.write_text(tomlkit.dumps(config), encoding="utf-8")
        else:
            assert block.language == "sh", block
            self.said = self.run("bash", "-euc", block.code)

    def run(self, *words: str) -> str:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "PYTHONPATH": f"{ROOT}:{self.folder}", "COLUMNS": "120"}
        done = subprocess.run(
            words, cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        logs = "".join(
            log.read_text(encoding="utf-8")[-2000:] for log in self.folder.glob("runs/*/logs/*.log")
        )
        assert done.returncode == 0, done.stdout + done.stderr + logs
        return done.stdout


def toml_blocks() -> Iterator[Any]:
    for page in files_of_git():
        # CONTRIBUTING.md has parts of pyproject.toml, which test_contributing.py uses
        if page.suffix == ".md" and page.name != "CONTRIBUTING.md":
            # a title that is not a config's: the project file of a package
            config = r"^```toml(?! title=\"pyproject)[^\n]*\n(.*?)^```$"
            found = re.findall(config, page.read_text("utf-8"), re.M | re.S)
            for number, code in enumerate(found, 1):
                yield pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("code", [*toml_blocks()])
def test_a_block_of_toml_is_a_config_beside_what_every_config_needs(
    code: str, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"run": {"name": "page"}, "engine": {"kind": "vllm"}, "tasks": {}}
    merge(config, tomllib.loads(code))
    for task in config["tasks"].values() or [config["tasks"].setdefault("page", {})]:
        if "eval_of" not in task:
            task.setdefault("dataset", {"kind": "jsonl", "path": "rows.jsonl"})
            task.setdefault("judge", "math_verify")
    file = tmp_path / "page.toml"
    file.write_text(tomlkit.dumps(config), encoding="utf-8")
    load_config(file, [])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_your_own_data_set_judge_agent_loop_and_trainer_make_a_run(tmp_path: Path) -> None:
    build_model(tmp_path).rename(tmp_path / "model")
    reader = Reader(tmp_path)
    trainer = files_of_the_readme()["my_trainer.py"]
    (tmp_path / "my_trainer.py").write_text(trainer, encoding="utf-8")
    try:
        for page in YOUR_OWN:
            for block in blocks(page):
                reader.follow(block)
    finally:
        EmbeddedServer(tmp_path / "runs" / "mine" / "server").kill()
    assert "lost 0 · in two stages 0 · trained twice 0" in reader.said
    log = StepLog(tmp_path / "runs" / "mine" / "steps.jsonl")
    log.read_new()
    assert [(step.step, len(step.gids)) for step in log.steps] == [(1, 2), (2, 2), (3, 2)]
    assert all("rewards/mean" in step.metrics for step in log.steps)
    assert "3 of 3" in reader.run("rolloutmq", "runs")
    tests = sorted(path.name for path in tmp_path.glob("test_my_*.py"))
    assert "5 passed" in reader.run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests
    )


def test_every_extra_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (PAGES / "extras.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `([\w-]+)` \|", text, re.M)
    assert sorted(explained) == sorted(project["optional-dependencies"])


@pytest.mark.parametrize("name", ["command", "config", "metric"])
def test_every_row_has_a_meaning(name: str) -> None:
    page = REFERENCES[f"docs/pages/{name}_reference.md"]()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_key_that_scripts_name_is_on_the_page() -> None:
    page = key_reference()
    assert [name for name in SLOTS if not re.search(rf"`{name}\*?`", page)] == []
