"""`rolloutmq rejudge`: a judge again on the responses of a group, wherever they are."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.ids import group_id
from buffer.redis.server.embedded import EmbeddedServer
from buffer.wire.rollout import Status
from tests.buffer.keyspace import exact
from tests.rolloutmq.conftest import Command, json_of
from tests.rolloutmq.populate import Scene, write_samples

JUDGES = """
import asyncio

def score(*, response, ground_truth, state):
    return {"score": 3.0, "length": len(response)}

CLIENT = {}

async def late(*, state, **_):
    loop = asyncio.get_running_loop()
    if state.index == 0:
        CLIENT["loop"] = loop
    assert CLIENT["loop"] is loop  # as an HTTP client demands
    return 2.0

def rank(states):
    return [float(n) for n, _ in enumerate(states)]

def fail(*, response, **_):
    return read(response)

def read(text):
    return int(text)  # here

def fail_all(states):
    return read("nothing")
"""
CONFIG = Path(__file__).with_name("rejudge.toml").read_text(encoding="utf-8")


@pytest.fixture
def rejudge(scene: Scene, command: Command, tmp_path: Path) -> Any:
    (tmp_path / "judges_again.py").write_text(JUDGES)

    def run(draw: int, judge: str, *flags: str) -> Any:
        path = tmp_path / "c.toml"
        path.write_text(CONFIG.format(judge=judge))
        before = exact(scene.run.store.client, scene.run.name)
        done = command("rejudge", group_id("math", draw), "--config", str(path), *flags)
        assert exact(scene.run.store.client, scene.run.name) == before
        return done

    return run


def bury(scene: Scene) -> int:
    (job,) = scene.claim("w1", 1)
    scene.run.jobs.release("w1", job, "failed", "no")
    group = scene.run.buffer.read(group_ref(scene, 3))
    for state in group.states:
        state.status = Status.FAILED
    kept = type(group)(job.gid, "math", group.states)
    assert scene.run.dead_letters.keep_responses(job, kept)
    return int(job.gid[-10:])


def group_ref(scene: Scene, draw: int) -> Any:
    from buffer.groups.record_walk import payload_of

    gid = group_id("math", draw)
    return payload_of(gid, scene.run.record(gid))


@pytest.mark.parametrize("place", ["pool", "batch", "dead", "sample"])
@pytest.mark.parametrize(
    ("judge", "scores"), [("score", [3, 3]), ("late", [2, 2]), ("rank", [0, 1])]
)
def test_it_judges_what_a_group_said_wherever_it_is(
    scene: Scene, server: EmbeddedServer, rejudge: Any, place: str, judge: str, scores: list[float]
) -> None:
    draw = {"pool": 3, "batch": 2, "sample": 0}.get(place)
    if place == "sample":
        write_samples(scene, server.folder)
    done = rejudge(bury(scene) if draw is None else draw, judge, "--json")
    verdicts = json_of(done)["verdicts"]
    assert [verdict["reward"]["score"] for verdict in verdicts] == scores
    assert [verdict["error"] for verdict in verdicts] == [None, None]


def test_what_it_raises_is_shown_with_the_users_line(rejudge: Any) -> None:
    done = rejudge(3, "fail", "--json", "--member", "1")
    assert done.returncode == 1
    (verdict,) = orjson.loads(done.stdout)["verdicts"]
    line = JUDGES.split("\n").index("    return int(text)  # here") + 1
    assert f'/judges_again.py", line {line}, in read' in verdict["error"]
    assert "check/judge.py" not in verdict["error"]


def test_pdb_opens_at_the_users_line(rejudge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("p 'text is', text\nw\nq\n"))
    done = rejudge(3, "fail", "--pdb")
    assert done.returncode == 1
    _, _, session = done.stdout.partition("(Pdb) ")
    assert session.startswith("('text is', '")
    assert "check/judge.py" not in session


def test_a_group_without_responses_is_refused(rejudge: Any) -> None:
    done = rejudge(5, "score")
    assert done.returncode == 2
    assert "are not kept" in done.stderr


def test_without_a_launcher_it_wants_a_config(command: Command, scene: Scene) -> None:
    done = command("rejudge", group_id("math", 3))
    assert done.returncode == 2
    assert "--config" in done.stderr
