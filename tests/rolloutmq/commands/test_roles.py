from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer.maintenance.remove_run import remove_run
from buffer.redis.keys import Keys
from buffer.redis.server.acl import acl_line, user_name
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from tests.buffer.redis.server.test_acl import words
from tests.rolloutmq.conftest import in_process
from tests.rolloutmq.populate import populate

VIEWS = (
    "status", "workers", "ls", "show math-0000000001", "batch 2", "dead", "metrics", "runs", "export {folder}/groups.jsonl",
)  # fmt: skip
STEERS = (
    *VIEWS, "doctor", "fsck", "pause", "resume", "set max_tries=5", "janitor --once", "requeue math-0000000005 --yes",
    "drop math-0000000005 --yes", "fence w1 --yes", "fence w0 --yes", "import {folder}/groups.jsonl --task math", "pause", "save {folder}/saved",
    "REMOVE", "restore {folder}/saved", "status", "resume",
)  # fmt: skip
"""In this order; REMOVE removes the run, which nobody uses any more."""


@pytest.fixture
def raw(server: EmbeddedServer, store: Store) -> Iterator[Any]:
    populate(store)
    with server.connect() as client:
        for role in ("viewer", "operator"):
            client.execute_command("ACL", "SETUSER", *words(acl_line("demo", role, "secret")))
        yield client


@pytest.mark.parametrize(("role", "lines"), [("viewer", VIEWS), ("operator", STEERS)])
def test_each_command_is_denied_nothing(
    server: EmbeddedServer, raw: Any, role: str, lines: tuple[str, ...], tmp_path: Path
) -> None:
    url = server.url.replace("unix://", f"unix://{user_name('demo', role)}:secret@")
    raw.acl_log_reset()
    for line in lines:
        if line == "REMOVE":
            raw.sadd("rq:queues:rmq-judge:demo", "rq:queue:rmq-judge:demo")
            store = Store(url, deadline_s=400.0)
            remove_run(store, Keys("demo"))
            store.close()
            continue
        done = in_process(*line.format(folder=tmp_path).split(), REDIS_URL=url)
        assert done.returncode == 0, (line, done.stderr)
        assert [entry["object"] for entry in raw.acl_log()] == [], line


def test_a_viewer_is_told_what_it_cannot_see_or_change(server: EmbeddedServer, raw: Any) -> None:
    url = server.url.replace("unix://", f"unix://{user_name('demo', 'viewer')}:secret@")
    assert in_process("fsck", REDIS_URL=url).returncode == 0
    assert "CONFIG GET is forbidden for this user" in in_process("doctor", REDIS_URL=url).stdout
    refused = in_process("pause", REDIS_URL=url)
    assert refused.returncode != 0
    assert "use the user of a role that may" in refused.stderr
