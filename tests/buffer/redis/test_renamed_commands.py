from __future__ import annotations

from pathlib import Path

import pytest

from buffer.errors import StoreError
from buffer.redis.server.check import check_all
from buffer.redis.store import Store
from buffer.run.open import can_wait_for_disk
from tests.buffer.busy_run import busy_run, moves
from tests.servers import SAFE, raw_client, start_redis

NEEDED = ("EVALSHA", "SCRIPT", "INFO", "CLIENT")


def use(url: str) -> None:
    """What processes of a run do: first contact, and nearly every script."""
    store = Store(url, deadline_s=5.0)
    try:
        store.retrying("first contact", lambda: store.servers.is_cluster)
        store.retrying("first contact", lambda: can_wait_for_disk(store))
        store.retrying("first contact", lambda: check_all(store.servers))
        with raw_client(url) as client:
            scene = busy_run(store, client, "demo")
            for move in moves(scene).values():
                move()
            scene.run.account.fsck()
    finally:
        store.close()


@pytest.mark.parametrize("command", [*NEEDED, "HSET", "ZADD"])
def test_missing_command_is_named(command: str, tmp_path: Path) -> None:
    found: list[StoreError] = []
    with start_redis(tmp_path, *SAFE, "--rename-command", command, "") as url:
        try:
            use(url)
        except StoreError as error:
            found.append(error)
    assert found
    for each in found:
        assert command in each.message or "command of a script" in each.message
        assert "rename-command" in each.hint
