"""Who may do what on the server: one user per role of a run, as lines of a Redis or Valkey ACL
file.

    role      writes                                                                     runs
    producer  groups, waiting lines, accounts, cursors, control, limits                  enqueue, reissue, janitor
    worker    groups, leases, waiting lines, pools, accounts; no ledger, batch, control  claim to submit, reap
    judge     keys of rq                                                                 rq jobs
    trainer   everything of the run                                                      take, commit, publish, pause
    viewer    nothing                                                                    status, top, ls, show, fsck
    operator  everything of the run; reads the server's settings                         all of the command

A script may only do what its caller may do: the server checks each command inside of it. So a user
has three parts: what may be read; a selector for what may be written; and one that lets scripts be
called with any key of the run, which by itself permits nothing. Every role but judge sees all of
its run; of other runs, none sees more than the names.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from buffer.store.keys import Keys

_READ = "+@read -@dangerous +info"
_CONNECTION = "+@connection -@admin -@dangerous +info +time +wait +cluster|slots +cluster|shards +cluster|info"
_SETTINGS = "+config|get"
_WRITE = "+@read +@write -@dangerous"

_GROUPS = (
    "jobs:*", "bell:*", "group:*", "leases", "pool:*", "order:*", "payload:*", "unpinned", "garbage", "bytes",
    "progress:*", "ended:*:filtered", "ended:*:dropped", "dead", "dead:*", "workers", "worker:*", "holds:*", "events",
    "clock",
)  # fmt: skip
"""What moves while groups are made. Written by workers, and by whoever sweeps."""


@dataclass(frozen=True, slots=True)
class Role:
    """`writes`: names of keys behind the run's prefix, as patterns. `more`: further rules. `sees`
    the run or not.
    """

    writes: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    sees: bool = True


_RQ = "(~rq:* +@read +@write +@transaction -@dangerous)"
_RQ_WORKER = ("(~rq:* +eval +evalsha)", "&rq:*", "+@pubsub", "+@transaction", "+client|list")

ROLES = {
    "producer": Role(
        (*_GROUPS, "control", "cursors", "meta", "ledger:*", "batch:*", "ended:*"), (_SETTINGS,)
    ),
    "worker": Role(_GROUPS, (_SETTINGS, _RQ)),
    # what a model wrote runs there: it sees nothing of the run
    "judge": Role((), (_SETTINGS, _RQ, *_RQ_WORKER), sees=False),
    "trainer": Role(("*",), (_SETTINGS, "+publish")),
    "viewer": Role(),
    "operator": Role(("*",), (_SETTINGS, "+publish", "+@transaction", "+memory|usage")),
}


def user_name(run: str, role: str) -> str:
    """The name of the user that has a role of a run."""
    return f"{run}-{role}"


def acl_line(run: str, role: str, password: str) -> str:
    """One line of an ACL file. It holds a hash of the password, never the password."""
    secret = hashlib.sha256(password.encode()).hexdigest()
    rules = [f"user {user_name(run, role)} on #{secret} resetchannels resetkeys -@all", _CONNECTION]
    # what is taken away comes first
    return " ".join([*rules, *_rules_of_keys(Keys(run), ROLES[role]), *ROLES[role].more])


def _rules_of_keys(keys: Keys, role: Role) -> list[str]:
    if not role.sees:
        return []
    # in a cluster payloads have slots, and so prefixes, of their own
    prefixes = (keys.prefix, keys.spread_prefix)
    rules = [
        f"&{keys.control} +subscribe +unsubscribe +script|load",
        *(f"%R~{prefix}*" for prefix in prefixes),
        _READ,
    ]
    rules.append(f"({' '.join(f'~{prefix}*' for prefix in prefixes)} +eval +evalsha)")
    if role.writes:
        written = [*(f"~{keys.prefix}{name}" for name in role.writes), f"~{prefixes[1]}*"]
        rules.append(f"({' '.join(written)} {_WRITE})")
    return rules
