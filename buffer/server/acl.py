"""Users of the server: one per role of a run, as lines of a Redis or Valkey ACL file.

    role      writes                                                 runs
    producer  groups, queues, accounts, cursors, control, limits     enqueue, reissue, janitor
    worker    groups, leases, queues, pools, accounts; no ledger,    claim to submit, reap
              batch, control
    judge     keys of rq                                             rq jobs
    trainer   everything of the run                                  take, commit, publish, pause
    viewer    nothing                                                status, top, ls, show, fsck
    operator  everything of the run; reads the server's settings     every command

A script may only do what its caller may do: the server checks each command inside it. So a user has
three parts: keys to read, a selector for keys to write, and a selector that permits to call scripts
with any key of the run, which alone permits nothing. Every role but judge reads all of its run, and
how many rollouts wait for judges; of other runs, it sees nothing but the names.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from buffer.store.keys import Keys

_READ = "+@read -@dangerous +info"
_CONNECTION = (
    "+@connection -@admin -@dangerous +info +time +wait "
    "+cluster|slots +cluster|shards +cluster|info"
)
_SETTINGS = "+config|get"
_WRITE = "+@read +@write -@dangerous"

_GROUPS = (
    "jobs:*", "bell:*", "group:*", "leases", "pool:*", "order:*", "age:*",
    "payload:*", "unpinned", "garbage", "bytes",
    "progress:*", "ended:*:filtered", "ended:*:dropped", "dead", "dead:*",
    "workers", "worker:*", "holds:*", "events", "clock",
)  # fmt: skip
"""Keys that change while groups are generated; workers and janitors write them."""


@dataclass(frozen=True, slots=True)
class Role:
    """What the user of one role may do."""

    writes: tuple[str, ...] = ()
    """patterns of keys to write, behind the run's prefix"""
    more: tuple[str, ...] = ()
    """further rules of the ACL"""
    sees: bool = True
    """whether the user may read the run"""


_RQ = "(~rq:* +@read +@write +@transaction -@dangerous)"
_RQ_WORKER = ("(~rq:* +eval +evalsha)", "&rq:*", "+@pubsub", "+@transaction", "+client|list")

ROLES = {
    "producer": Role(
        (*_GROUPS, "control", "cursors", "meta*", "ledger:*", "batch:*", "ended:*"),
        (_SETTINGS,),
    ),
    "worker": Role(_GROUPS, (_SETTINGS, _RQ)),
    # a judge may execute code that a model wrote, so it sees nothing of the run
    "judge": Role((), (_SETTINGS, _RQ, *_RQ_WORKER), sees=False),
    "trainer": Role(("*",), (_SETTINGS, "+publish")),
    "viewer": Role(),
    "operator": Role(("*",), (_SETTINGS, "+publish", "+@transaction", "+memory|usage")),
}


def user_name(run: str, role: str) -> str:
    """Return the name of the user for a role of a run."""
    return f"{run}-{role}"


def acl_line(run: str, role: str, password: str) -> str:
    """Return one line of an ACL file; it holds a hash of the password, never the password."""
    secret = hashlib.sha256(password.encode()).hexdigest()
    rules = [f"user {user_name(run, role)} on #{secret} resetchannels resetkeys -@all", _CONNECTION]
    # the server applies rules in order: these remove everything, the others add to it
    return " ".join([*rules, *_rules_of_keys(Keys(run), ROLES[role]), *ROLES[role].more])


def _rules_of_keys(keys: Keys, role: Role) -> list[str]:
    if not role.sees:
        return []
    # in a cluster, payloads have slots of their own, and therefore another prefix
    prefixes = (keys.prefix, keys.spread_prefix)
    rules = [
        f"&{keys.control} +subscribe +unsubscribe +script|load",
        *(f"%R~{prefix}*" for prefix in prefixes),
        # lengths and live judges, for doctor; the jobs themselves hold texts of all runs
        f"%R~rq:queue:{keys.judge_queue} %R~rq:workers:{keys.judge_queue} %R~rq:worker:*",
        _READ,
    ]
    rules.append(f"({' '.join(f'~{prefix}*' for prefix in prefixes)} +eval +evalsha)")
    if role.writes:
        written = [*(f"~{keys.prefix}{name}" for name in role.writes), f"~{prefixes[1]}*"]
        rules.append(f"({' '.join(written)} {_WRITE})")
    return rules
