"""`--help` is light, complete, and the same on every machine."""

from __future__ import annotations

import subprocess
import sys

import orjson
import pytest

from tests.cli.conftest import ROOT, rolloutmq

COMMANDS = (
    *("status", "top", "ls", "show", "dead", "requeue", "drop", "tail", "workers", "pause", "continue", "fence"),
    *("save", "resume", "export", "import", "janitor", "fsck", "doctor", "server", "batch", "drain"),
)
HEAVY = {"torch", "vllm", "transformers", "rq", "reasoning_gym", "matplotlib"}


def test_help_lists_every_exit_code_and_examples() -> None:
    done = rolloutmq("--help")
    assert done.returncode == 0
    for words in ("Exit codes:", "130  interrupted", "6  the account", "rolloutmq fsck", "ROLLOUTMQ_DEBUG=1"):
        assert words in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys, orjson, rolloutmq\n"
        "sys.argv = ['rolloutmq', '--help']\n"
        "try:\n    rolloutmq.main()\n"
        "except SystemExit:\n    sys.stderr.buffer.write(orjson.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=True)
    loaded = {name.partition(".")[0] for name in orjson.loads(done.stderr)}
    assert not loaded & HEAVY


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_has_an_example(name: str) -> None:
    done = rolloutmq(name, "--help")
    assert done.returncode == 0
    assert f"Example: rolloutmq {name}" in done.stdout
    assert "--json" in done.stdout
    assert "--run-dir" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_version_is_shown_without_a_server() -> None:
    done = rolloutmq("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("rolloutmq")


def test_unknown_command_is_a_usage_error() -> None:
    done = rolloutmq("statsu")
    assert done.returncode == 2
    assert "statsu" in done.stderr
    assert "Traceback" not in done.stderr
