"""`--help` is light, complete, and the same on every machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from rolloutmq.cli import main
from rolloutmq.command_list import all_commands
from tests.rolloutmq.conftest import ROOT

COMMANDS: dict[str, Any] = all_commands()
ONE = ["math-0000000042"]
ARGUMENTS = {
    "show": ONE, "rejudge": ONE, "requeue": ONE, "drop": ONE, "batch": ["3"],
    "set": ["max_staleness=2"], "fence": ["w1"], "save": ["unused"], "restore": ["unused"],
    "export": ["unused.jsonl"], "import": ["unused.jsonl"], "logs": ["events"],
}  # fmt: skip
"""What commands cannot do without."""


def flags_of(name: str) -> set[str]:
    return {flag for parameter in COMMANDS[name].params for flag in parameter.opts}


ASKING = sorted(
    name for name in COMMANDS if {"--json", "--run-dir", "--redis-url"} <= flags_of(name)
)
"""Those that look at a run or steer it."""
HEAVY = {"torch", "vllm", "transformers", "rq", "reasoning_gym", "matplotlib", "redis"}


def test_help_imports_no_command() -> None:
    program = (
        "import sys, rolloutmq.cli\n"
        "try:\n    rolloutmq.cli.main()\n"
        "except SystemExit:\n"
        f"    heavy = {HEAVY}.intersection(m.partition('.')[0] for m in sys.modules)\n"
        "    print([m for m in sys.modules if m.startswith('rolloutmq.cli.')], heavy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    assert "workers" in done.stdout
    assert done.stdout.splitlines()[-1] == "[] set()"


@pytest.mark.parametrize("name", ASKING)
def test_every_command_tells_programs_of_an_error_in_the_same_way(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["rolloutmq", name, *ARGUMENTS.get(name, []), "--json", "--run-dir", "nowhere"]
    )
    kind, code = ("SnapshotError", 1) if name == "restore" else ("StoreUnavailable", 3)
    with pytest.raises(SystemExit) as left:
        main()
    said = capfd.readouterr()
    told = orjson.loads(said.err)
    assert (said.out, left.value.code) == ("", code)
    assert (told["exit_code"], told["kind"]) == (code, kind)
    assert "nowhere" in told["error"] or name == "restore"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["statsu", "--json"], "No such command 'statsu'"),
        (["status", "--jsn", "--json"], "No such option: --jsn"),
        (["show", "--json"], "Missing argument 'GID"),
        (["pause", "--timeout", "soon", "--json"], "Invalid value for '--timeout'"),
    ],
    ids=["command", "option", "argument", "value"],
)
def test_a_program_is_told_of_wrong_words_as_of_every_other_error(
    words: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["rolloutmq", *words])
    with pytest.raises(SystemExit) as left:
        main()
    said = capfd.readouterr()
    told = orjson.loads(said.err)
    assert (said.out, left.value.code) == ("", 2)
    assert (told["exit_code"], told["kind"]) == (2, "ConfigError")
    assert message in told["error"]
