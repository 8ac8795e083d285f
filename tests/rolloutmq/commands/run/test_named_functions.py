from __future__ import annotations

from pathlib import Path

import pytest

from tests.rolloutmq.conftest import Command

CONFIG = """
run = { name = "mine" }
[tasks.sums]
judge = "exact_match"
[tasks.sums.dataset]
kind = "jsonl"
path = "data.jsonl"
[engine]
kind = "simulated"
"""


KEYS = [
    "tasks.sums.judge=nowhere:score",
    "tasks.sums.judge={a='nowhere:score'}",
    "tasks.sums.agent_loop=nowhere:Loop",
    "tasks.sums.agent_loop_options={tools=['nowhere:search']}",
    "tasks.sums.agent_loop_options={environment='nowhere:Game'}",
    "tasks.sums.strategy.is_valid_sample_fn=nowhere:keep",
    "strategy.should_continue_fn=nowhere:enough",
]


def refusal(command: Command, folder: Path, *keys: str) -> str:
    (folder / "mine.toml").write_text(CONFIG, encoding="utf-8")
    (folder / "data.jsonl").write_text('{"question": "1", "answer": "1"}\n', encoding="utf-8")
    options = [option for key in keys for option in ("--set", key)]
    # no server: what the config names is looked up first
    server = ("--redis-url", "unix:///nowhere.sock")
    done = command("worker", "mine.toml", *options, *server, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert not (folder / "runs").exists()
    return done.stderr


@pytest.mark.parametrize("key", KEYS)
def test_a_function_that_cannot_be_imported(key: str, command: Command, tmp_path: Path) -> None:
    assert "module 'nowhere' cannot be imported" in refusal(command, tmp_path, key)


def test_what_harbor_imports_is_left_to_its_own_python(command: Command, tmp_path: Path) -> None:
    trial = "{agent={import_path='nowhere:Agent'}}"
    options = f"tasks.sums.agent_loop_options={{harbor_python='/dev/null', trial={trial}}}"
    said = refusal(command, tmp_path, "tasks.sums.agent_loop=harbor", options)
    assert "harbor_python" in said
    assert "module 'nowhere'" not in said
