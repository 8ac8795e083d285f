"""Every key and every script, tried by every role; a new key or script has to be declared here.

Keys are tried one by one (`ACL DRYRUN`), scripts with the calls of a whole story. Every role makes
each call before it is made: a role that changes anything may do what the script does.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis

from buffer.redis.key_table import TABLE
from buffer.redis.scripts import Arg, Script, library
from buffer.redis.server.acl import ROLES, acl_line, user_name
from tests.buffer.faulty_store import FaultyStore
from tests.buffer.keyspace import exact
from tests.buffer.redis.server.test_acl import PASSWORD, words
from tests.buffer.scene import LIMITS, Scene
from tests.buffer.time_machine import put_back, remember
from tests.buffer.whole_story import tell_a_whole_story
from tests.servers import Server, raw_client, start_server

VISITS = 6
CHANGING = 2
"""Calls of each script that are tried at most, and such that change something."""

ALL = "producer worker trainer operator"
TIDY = "producer trainer operator"
STEER = "trainer operator"
CALLS = "worker trainer operator"

WRITES = {
    "meta": TIDY, "control": TIDY, "clock": ALL, "lineages": STEER, "report": STEER, "jobs:<task>:<lane>": ALL, "bell:<who>": ALL,
    "group:<gid>": ALL, "age:<task>": ALL, "leases": ALL, "pool:<task>:<status>": ALL,
    "payload:<gid>:<token>": ALL, "garbage": ALL, "bytes": ALL, "ledger:<name>": TIDY,
    "batch:<name>:<step>": TIDY, "progress:<task>": ALL, "cursors": TIDY, "ended:<task>:archived": TIDY,
    "ended:<task>:filtered": ALL, "ended:<task>:dropped": ALL, "ended:<task>:skipped": ALL, "skips:<task>": ALL, "dead": ALL, "dead:<gid>": ALL, "workers": ALL,
    "worker:<id>": ALL, "tokens:<id>": ALL, "bad_submissions": STEER, "weights": STEER, "weights:<lineage>:<version>": STEER, "leased:<id>": ALL,
    "events": ALL,
    **dict.fromkeys(("verdicts", "verdicts_before", "judge_use", "limit", "limit_queue", "limit_turns", "limit_callers", "limit_caller:<caller>"), CALLS),
}  # fmt: skip
"""Roles that may write a kind of key."""

CHANGES = {
    **dict.fromkeys(
        ("claim", "deregister", "drop", "expire", "resume_task", "halt", "heartbeat", "keep_responses", "keep_turns", "put", "reap", "receipt", "reconcile",
         "register", "reissue", "release", "requeue", "set_target", "submit", "update"), ALL
    ),
    **dict.fromkeys(
        ("beat", "commit", "create_run", "dissolve_batch", "enqueue", "forget", "producer_open",
         "mark_trained", "refill", "regenerate", "rescore", "reset_ledger", "restore_batch", "set_limits", "take_batch"), TIDY
    ),
    **dict.fromkeys(
        ("permit", "keep_verdict"), CALLS
    ),
    **dict.fromkeys(
        ("unbar_worker", "control", "publish_weights", "quarantine", "report", "trainer_open", "list_weights"), STEER
    ),
}  # fmt: skip
"""Roles that can change a run with a script: because it is their work, or because they may write
its keys anyway.
"""

READS = {
    "check",
    "check_leased",
    "counts",
    "pass_over",
    "peek",
    "silent",
    "sync",
    "tokens",
    "totals",
}
"""Scripts that change nothing; `sync` notes the time, and here is nothing to pass over."""

STOPPED_LATE = {
    ("control", "producer"), ("dissolve_batch", "worker"), ("forget", "worker"), ("publish_weights", "producer"),
    ("quarantine", "producer"), ("mark_trained", "worker"), ("rescore", "worker"), ("trainer_open", "producer"),
}  # fmt: skip
"""Who is denied a script only after it wrote something: nothing that the role may not write by
itself.
"""

NAMES = {
    "task": "math", "lane": "fresh", "status": "completed", "who": "workers", "gid": "math-0000000001", "token": "t",
    "name": "train", "step": "1", "id": "w0", "caller": "c", "lineage": "l0", "version": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server("valkey", tmp_path_factory.mktemp("roles")) as server:
        yield server


@pytest.fixture
def raw(own_server: Server, run_name: str) -> Iterator[Any]:
    with own_server.connect() as client:
        for role in ROLES:
            client.execute_command("ACL", "SETUSER", *words(acl_line(run_name, role, PASSWORD)))
        yield client


COMMANDS = {
    "HASH": (("HGETALL",), ("HSET", "a", "b"), ("DEL",)),
    "LIST": (("LRANGE", "0", "-1"), ("RPUSH", "a"), ("UNLINK",)),
    "ZSET": (("ZRANGE", "0", "-1"), ("ZADD", "1", "a"), ("DEL",)),
    "SET": (("SMEMBERS",), ("SADD", "a"), ("SREM", "a")),
    "STREAM": (("XLEN",), ("XADD", "*", "a", "b"), ("DEL",)),
    "STRING": (("GET",), ("SET", "a"), ("EXPIRE", "1")),
}
"""One command that reads, then some that write; the key comes behind the first word."""


def allows(raw: Any, user: str, key: str, command: Sequence[str]) -> bool:
    said = raw.execute_command("ACL", "DRYRUN", user, command[0], key, *command[1:])
    return bool(said == b"OK")


def test_every_kind_of_key_is_written_by_the_roles_that_are_declared(
    raw: Any, run_name: str
) -> None:
    assert set(TABLE) == set(WRITES)
    for kind, row in TABLE.items():
        key = f"rmq:{{{run_name}}}:" + re.sub(r"<(\w+)>", lambda place: NAMES[place[1]], kind)
        read, *writes = COMMANDS[row.type]
        for role in ROLES:
            user = user_name(run_name, role)
            assert allows(raw, user, key, read) == (role != "judge"), (kind, role)
            for write in writes:
                assert allows(raw, user, key, write) == (role in WRITES[kind].split()), (
                    kind,
                    role,
                    write[0],
                )
            for command in COMMANDS[row.type]:
                assert not allows(raw, user, key.replace(run_name, "other"), command), (
                    kind,
                    role,
                    command[0],
                )


class MatrixStore(FaultyStore):
    """Records the roles that could change a run with a script.

    `changed`: these roles by script; `half_done`: roles that were denied it too late.
    """

    one_by_one = True

    def __init__(self, url: str, raw: Any, run: str) -> None:
        super().__init__(url, raw, run=run)
        self.visits = Counter[str]()
        self.changing = Counter[str]()
        self.changed: dict[str, set[str]] = defaultdict(set)
        self.half_done: set[tuple[str, str]] = set()
        logins = {
            role: url.replace("unix://", f"unix://{user_name(run, role)}:{quote(PASSWORD)}@")
            for role in ROLES
        }
        self.clients = {role: raw_client(login) for role, login in logins.items()}

    def look(self, script: Script, keys: list[str], args: list[Arg]) -> None:
        name = script.name
        self.visits[name] += 1
        is_known = self.visits[name] > VISITS or self.changing[name] >= CHANGING
        if not is_known and script.header.writes:
            moved = [role for role in ROLES if self._moves(script, role, keys, args)]
            self.changed[name].update(moved)
            self.changing[name] += bool(moved)

    def _moves(self, script: Script, role: str, keys: list[str], args: Sequence[Any]) -> bool:
        """Whether the role can change the run with that call; it is then undone."""
        before = exact(self.raw, self.run)
        moment = remember(self.raw, self.run)
        is_denied = False
        try:
            self.clients[role].evalsha(script.sha, len(keys), *keys, *args)
        except redis.ResponseError as error:
            if "permission" not in str(error):
                raise
            is_denied = True
        has_changed = exact(self.raw, self.run) != before
        if has_changed:
            put_back(self.raw, self.run, moment)
            self.half_done |= {(script.name, role)} if is_denied else set()
        return has_changed and not is_denied


@pytest.mark.slow
def test_every_script_changes_a_run_for_no_role_but_the_declared(
    own_server: Server, raw: Any, run_name: str, tmp_path: Path
) -> None:
    store = MatrixStore(own_server.url, raw, run_name)
    changes = {"max_tries": 2, "on_straggler": "retry", "order": "fifo"}
    tell_a_whole_story(Scene(store, raw, run_name, LIMITS.model_copy(update=changes)), tmp_path)
    for client in store.clients.values():
        client.close()
    store.close()
    assert set(CHANGES) | READS == set(library())
    found = {script: roles for script, roles in store.changed.items() if roles}
    assert set(found) == set(CHANGES)
    # which branches a story takes may differ by the order of a set: nobody else may do it, in any
    # of them
    assert {name: found[name] - set(CHANGES[name].split()) for name in found} == {
        name: set() for name in found
    }
    assert all("operator" in roles for roles in found.values())
    assert store.half_done <= STOPPED_LATE
