"""Every line of the table of docs/pages/commands.md, as it stands, is answered by a run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from rolloutmq.config.load import load_config
from tests.rolloutmq.conftest import ROOT, Command
from tests.rolloutmq.populate import populate_as_documented

_TABLE = re.compile(
    r"^\| (?P<question>[^|]+) \|[^|]*(?:\|[^|`]*)*\| `(?P<line>(?:[A-Z]|--)[^`]+)` \|$",
    re.MULTILINE,
)
_PAGE = (ROOT / "docs" / "pages" / "commands.md").read_text("utf-8")
RECIPES = {found["question"]: found["line"] for found in _TABLE.finditer(_PAGE)}


COMMANDS = [
    line
    for line in re.findall(r"`rolloutmq ([^`]+)`", _PAGE.partition("\n\n## ")[0])
    if line.split()[0]
    in ("status", "ls", "workers", "show", "batch", "dead", "fsck", "doctor", "runs")
]
"""Those that only read, and that end."""


@pytest.fixture(scope="module")
def documented(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    store = Store(server.url, deadline_s=400.0)
    store.client.flushall()
    populate_as_documented(store)
    yield server
    store.close()


@pytest.mark.parametrize("question", RECIPES)
def test_a_line_of_redis_cli_is_answered(question: str, documented: EmbeddedServer) -> None:
    line = RECIPES[question]
    answer = ask(documented, line)
    assert answer, line
    assert not answer[0].startswith(("(error)", "ERR ", "WRONGTYPE ")), (line, answer)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_answered(line: str, documented: EmbeddedServer, command: Command) -> None:
    done = command(*shlex.split(line))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_names_of_the_page_are_those_of_the_demo() -> None:
    config = load_config(ROOT / "configs" / "demo.toml", [])
    assert (config.run.name, next(iter(config.tasks))) == ("demo", "chain_sum")


def ask(server: EmbeddedServer, line: str) -> list[str]:
    cli = shutil.which("redis-cli")
    if cli is None:
        if os.environ.get("CI"):
            pytest.fail("no redis-cli on this machine, and CI must try the recipes")
        pytest.skip("no redis-cli on this machine")
    socket = Path(server.url.removeprefix("unix://").partition("?")[0])
    flags, typed = (shlex.split(line), None) if line.startswith("--") else ([], line)
    done = subprocess.run(
        [cli, "-s", str(socket), *flags],
        input=typed,
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    return [text for text in done.stdout.splitlines() if text]
