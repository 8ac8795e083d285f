"""Every `redis-cli` line of docs/pages/commands.md, as it stands, answers what the command answers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.ledger.audits import AuditFinding, AuditPosition
from buffer.redis.server.embedded import EmbeddedServer
from tests.rolloutmq.conftest import ROOT, Command, json_of
from tests.rolloutmq.populate import Scene

Answer = list[str]
Told = Callable[..., Any]
"""What `rolloutmq ARGS… --json` says."""

_TABLE = re.compile(
    r"^\| (?P<question>[^|]+) \|[^|]*(?:\|[^|`]*)*\| `(?P<line>(?:[A-Z]|--)[^`]+)` \|$",
    re.MULTILINE,
)
RECIPES = {
    found["question"]: found["line"]
    for found in _TABLE.finditer((ROOT / "docs" / "pages" / "commands.md").read_text("utf-8"))
}


def pairs(answer: Answer) -> dict[str, str]:
    return dict(zip(answer[::2], answer[1::2], strict=True))


def how_is_the_run(answer: Answer, told: Told) -> bool:
    control = pairs(answer)
    status = told("status")
    return bool(control["mode"] == status["mode"] and int(control["epoch"]) == status["epoch"])


def one_group(answer: Answer, told: Told) -> bool:
    return bool(pairs(answer) == told("show", "math-0000000002")["record"])


def a_batch(answer: Answer, told: Told) -> bool:
    batch = told("batch", "2")
    return answer[0] == batch["header"] and [line.split()[0] for line in answer[1:]] == gids(
        batch["groups"]
    )


def counters(answer: Answer, told: Told) -> bool:
    task = told("status")["tasks"]["math"]
    fields = pairs(answer)
    return all(
        int(fields[name]) == task[name]
        for name in ("enqueued", "cursor", "consumed", "produced_tokens")
    )


def audited(answer: Answer, told: Told) -> bool:
    account = pairs(answer)
    (failed,) = [row for row in told("status")["workers"] if row["failed_audit"]]
    return account["failed:w0"] == failed["failed_audit"] and (
        account["differs:w0"] == "1" and failed["id"] == "w0"
    )


def gids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["gid"] for row in rows]


def scored(*command: str, key: str = "gid") -> Callable[[Answer, Told], bool]:
    return lambda answer, told: (
        sorted(member.split(":")[-1] for member in answer[::2])
        == sorted(row[key] for row in told(*command))
    )


CHECKS: dict[str, Callable[[Answer, Told], bool]] = {
    "How is the run?": how_is_the_run,
    "What was changed, since when? How do I undo it?": lambda answer, told: (
        orjson.loads(answer[0])["overrides"] == {} and told("set", "--list") == {"settings": []}
    ),
    "Which groups wait?": lambda answer, told: (
        int(answer[0]) == len(told("ls", "--stage", "waiting"))
    ),
    "Which groups does a worker run?": lambda answer, told: (
        sorted(set(answer) - {"digest"}) == sorted(gids(told("ls", "--stage", "running")))
    ),
    "Until when are the groups of each worker leased?": lambda answer, told: (
        answer[::2] == [row["id"] for row in told("workers") if row["holds"]]
    ),
    "Which groups are ready, and how old are they?": scored(
        "ls", "--stage", "pool", "--status", "completed"
    ),
    "What is in one group?": one_group,
    "What did step 7 consume?": a_batch,
    "What are the counters of a task?": counters,
    "Which workers are alive?": scored("workers", key="id"),
    "What happened?": lambda answer, told: (
        len([line for line in answer if re.fullmatch(r"\d+-\d+", line)]) == 10
    ),
    "Which groups failed, and why?": scored("dead"),
    "How many rollouts wait for judges of kind rq?": lambda answer, told: answer == ["0"],
    "Which runs are on the server, and in folders here?": lambda answer, told: (
        answer == ["rmq:{demo}:meta"] and [run["run"] for run in told("runs")] == ["demo"]
    ),
    "How do I check workers that I do not own?": audited,
    "Who may do what?": lambda answer, told: answer[0].startswith("user default on "),
}


def test_every_recipe_is_checked() -> None:
    assert RECIPES.keys() == CHECKS.keys()


@pytest.mark.parametrize("question", CHECKS)
def test_recipe_says_what_the_command_says(
    question: str, scene: Scene, server: EmbeddedServer, command: Command
) -> None:
    line = (
        RECIPES[question]
        .replace("chain_sum-0000000042", "math-0000000002")
        .replace("chain_sum", "math")
    )
    found = AuditFinding(
        "differs", "w0", "math-0000000002", "its logprobs are 0.3 nats from others"
    )
    assert scene.run.audits.record(AuditPosition(), AuditPosition(2, 1), [found])
    answer = ask(server, line.replace("train:7", "train:2"))
    assert CHECKS[question](answer, lambda *args: json_of(command(*args, "--json"))), (line, answer)


def ask(server: EmbeddedServer, line: str) -> Answer:
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
