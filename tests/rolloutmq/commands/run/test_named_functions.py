"""A function that a config names and that does not exist is found before anything starts."""

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
    "plan.curriculum=nowhere:weights",
    "policy.order=nowhere:score",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_function_that_cannot_be_imported(key: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "data.jsonl").write_text('{"question": "1", "answer": "1"}\n', encoding="utf-8")
    # no server: what the config names is looked up first
    server = ("--redis-url", "unix:///nowhere.sock")
    done = command("worker", "mine.toml", "--set", key, *server, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "module 'nowhere' cannot be imported" in done.stderr
    assert not (tmp_path / "runs").exists()
