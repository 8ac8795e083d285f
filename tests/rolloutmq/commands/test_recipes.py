"""Every `redis-cli` line of docs/pages/commands.md, as it stands, is answered by a run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from buffer.redis.server.embedded import EmbeddedServer
from tests.rolloutmq.conftest import ROOT
from tests.rolloutmq.populate import Scene

_TABLE = re.compile(
    r"^\| (?P<question>[^|]+) \|[^|]*(?:\|[^|`]*)*\| `(?P<line>(?:[A-Z]|--)[^`]+)` \|$",
    re.MULTILINE,
)
RECIPES = {
    found["question"]: found["line"]
    for found in _TABLE.finditer((ROOT / "docs" / "pages" / "commands.md").read_text("utf-8"))
}


@pytest.mark.parametrize("question", RECIPES)
def test_recipe_is_answered(question: str, scene: Scene, server: EmbeddedServer) -> None:
    line = RECIPES[question]
    for theirs, ours in (("chain_sum-0000000042", "math-0000000002"), ("chain_sum", "math"),
                         ("train:7", "train:2")):  # fmt: skip
        line = line.replace(theirs, ours)
    answer = ask(server, line)
    assert answer, line
    assert not answer[0].startswith(("(error)", "ERR ", "WRONGTYPE ")), (line, answer)


def ask(server: EmbeddedServer, line: str) -> list[str]:
    """What the real redis-cli prints for a line that is typed into it, or given to it as flags."""
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
