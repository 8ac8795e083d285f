from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.rolloutmq.conftest import Command, in_process

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


SMALL = ("simulate", "--workers", "2", "--sequences", "16", "--batch-size", "8", "--steps", "6")


def test_simulate_tells_programs_the_same(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.jsonl"
    trace.write_text("\n".join(["100"] * 9 + ['{"seconds": 100}']), encoding="utf-8")
    done = in_process(*SMALL, "--trace", str(trace), "--json")
    document = orjson.loads(done.stdout)
    assert len(document["settings"]) == 13
    assert document["chosen"] in document["settings"]
    assert document["reasons"]


@pytest.mark.parametrize(
    "flags", [("--pause", "never"), ("--trace", "/no/such/file"), ("--workers", "0")]
)
def test_simulate_refuses_what_cannot_be_asked(flags: tuple[str, str]) -> None:
    done = in_process(*SMALL, *flags)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
