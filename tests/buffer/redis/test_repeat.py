"""A reply may be lost, so every script may run twice: the second run must change nothing (I13)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from buffer.limits import RunLimits
from tests.buffer.faulty_store import MUTATING, FaultyStore
from tests.buffer.scene import LIMITS, Scene
from tests.buffer.whole_story import tell_a_whole_story
from tests.servers import KINDS, Server

HINT = "sync"
"""Notes the time, each time."""


@pytest.fixture
def echo(server: Server, redis_client: redis.Redis, run_name: str) -> Iterator[FaultyStore]:
    store = FaultyStore(
        server.url, redis_client, run=run_name, repeats=[name for name in MUTATING if name != HINT]
    )
    yield store
    store.close()


@pytest.mark.parametrize(
    ("server", "on_straggler", "order"),
    [
        ("valkey", "drop", "staleness"),
        ("valkey", "retry", "staleness"),
        *[(kind, "retry", "fifo") for kind in KINDS],
        pytest.param("cluster", "retry", "fifo", marks=pytest.mark.slow),
        pytest.param("memory", "retry", "fifo", marks=pytest.mark.slow),
    ],
    indirect=["server"],
)
def test_no_script_changes_anything_when_it_runs_again(
    echo: FaultyStore,
    redis_client: redis.Redis,
    run_name: str,
    on_straggler: str,
    order: str,
    tmp_path: Path,
) -> None:
    limits = RunLimits(
        **{**LIMITS.model_dump(), "max_tries": 2, "on_straggler": on_straggler, "order": order}
    )
    scene = Scene(echo, redis_client, run_name, limits)
    tell_a_whole_story(scene, tmp_path)
    assert set(echo.repeats) == set(echo.echoes)
    scene.check()
