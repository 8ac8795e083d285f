"""Whatever a worker writes into the keys that it may write, no command sends it to the terminal as it is."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest

from tests.cli.conftest import Command
from tests.cli.populate import Scene

TITLE = "\x1b]0;owned\x07\x1b[2J\u202e"
"""Sets the title, clears the screen, writes from right to left."""

LOOKS = (
    ("status",), ("workers",), ("doctor",), ("ls",), ("dead",), ("ls", "--stage", "dead"), ("fsck",),
    ("show", "math-0000000003"), ("batch", "2"), ("tail", "--from-start", "--count", "12"),
)  # fmt: skip


@pytest.fixture
def forged(scene: Scene) -> Scene:
    """Texts of a hostile worker wherever people's texts stand."""
    keys, client = scene.run.keys, cast(Any, scene.run.store.control)
    for worker in client.zrange(keys.workers, 0, -1):
        texts = ("engine", "state", "weights", "requests", "done", "host", "surprise")
        client.hset(keys.worker(worker.decode()), mapping=dict.fromkeys(texts, TITLE))
    for gid in client.zrange(keys.dead, 0, -1):
        letter = {"reason": TITLE, "worker": TITLE, "try": 1}
        client.set(keys.dead_letter(gid.decode()), orjson.dumps(letter))
    client.delete(keys.events)
    for _ in range(12):
        client.xadd(keys.events, {"event": TITLE, TITLE: TITLE})
    for gid in ("math-0000000003", "math-0000000004"):
        client.hset(keys.group(gid), mapping={"owner": TITLE, "lineage": TITLE})
    return scene


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_no_command_lets_a_text_steer_the_terminal(forged: Scene, command: Command, words: tuple[str, ...]) -> None:
    done = command(*words)
    assert done.returncode in (0, 1, 6), done.stderr
    for code in ("\x1b", "\x07", "\u202e"):
        assert code not in done.stdout + done.stderr
