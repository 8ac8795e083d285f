"""Users of the server: one per role of a run, as lines of a Redis or Valkey ACL file.

    role      writes                                                 runs
    producer  groups, queues, accounts, cursors, control, limits     enqueue, reissue, janitor
    worker    groups, leases, queues, pools, accounts; no ledger,    claim to submit, reap
              batch, control
    judge     the run's judge queue                                  rq jobs
    trainer   everything of the run                                  take, commit, publish, pause
    viewer    nothing                                                status, top, ls, show, fsck
    operator  everything of the run                                  every command

Commands on keys are named one by one, so that no newer server or module adds one to a role. No role
reads or changes the server's settings, users, functions or other clients: CONFIG GET would also
read its passwords, and no ACL rule can exclude these.

The server checks each command inside a script, too. So a user has keys to read, a selector for keys
to write, and a selector that permits to call scripts with any key of the run, which alone permits
nothing. Scripts are called by their hash; producer, trainer and operator load them. Every role but
judge reads all of its run, and how many rollouts wait for judges; trainer, viewer and operator also
see the names of the keys of other runs.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from buffer.redis.key_table import TABLE, Writer
from buffer.redis.keys import LIMITS, Keys


def _allow(commands: str) -> str:
    return " ".join(f"+{command}" for command in commands.split())


# not named: WAITAOF and CLIENT SETINFO, since Redis 7.0 loads no file that contains them. CLIENT
# TRACKING shows the names of all keys that anybody changes
_CONNECTION = (
    "+@connection -@admin -@dangerous -client|tracking "
    "+info +time +wait +cluster|slots +cluster|shards +cluster|info"
)
_READ = _allow(
    "exists type ttl pttl get mget strlen getrange getbit bitcount hget hmget hgetall hlen hexists "
    "hkeys hvals hstrlen lrange llen lindex lpos scard smembers sismember srandmember xlen xrange "
    "xrevrange xread zcard zcount zrange zrevrange zrank zscore zmscore zrangebyscore "
    "zrevrangebyscore dump"
)
_WRITE = _allow(
    "del unlink expire pexpire persist rename copy set setrange setbit getdel hset hsetnx hincrby "
    "hdel rpush lset ltrim lrem blpop sadd srem xadd xdel zadd zrem"
)
_RQ = _allow(
    "exists ttl type del unlink expire pexpire persist get set hset hsetnx hget hmget hgetall hdel "
    "hexists hincrby hincrbyfloat lpush rpush lpop rpop blpop lmove blmove lrange lrem llen lpos "
    "sadd srem smembers scard sismember zadd zrem zrange zrangebyscore zremrangebyscore zcard "
    "zscore xadd xread xrange xrevrange xlen xtrim watch"
)
_SUBSCRIBE = _allow("subscribe unsubscribe")
_FIND_RUNS = _allow("scan")
_LOAD_SCRIPTS = _allow("script|load script|exists")
_TRANSACTION = _allow("multi exec discard watch unwatch")


def _writable(role: Writer) -> tuple[str, ...]:
    """Return the patterns of the keys that a role may write, behind the run's prefix."""
    return tuple(re.sub(r"<\w+>", "*", key) for key, row in TABLE.items() if role in row.writers)


@dataclass(frozen=True, slots=True)
class Role:
    writes: tuple[str, ...] = ()  # patterns of keys, behind the run's prefix
    more: tuple[str, ...] = ()  # further commands
    sees: bool = True  # whether the user may read the run
    judging: str = ""  # commands on rq's keys of the run's judge queue
    calls: bool = False  # whether it makes calls under limits, which all runs share


ROLES = {
    "producer": Role(_writable("producer"), (_LOAD_SCRIPTS,)),
    "worker": Role(_writable("worker"), (_TRANSACTION,), judging=_RQ, calls=True),
    # a judge may execute code that a model wrote, so it sees nothing of the run
    "judge": Role(more=(_TRANSACTION,), sees=False, judging=_RQ),
    "trainer": Role(("*",), (_FIND_RUNS, _LOAD_SCRIPTS, "+publish")),
    "viewer": Role(more=(_FIND_RUNS,)),
    "operator": Role(
        ("*",),
        (_FIND_RUNS, _LOAD_SCRIPTS, "+publish", _TRANSACTION, "+memory|usage"),
        judging="+unlink",  # with the run
        calls=True,
    ),
}

_JUDGE_KEYS = (
    "rq:queue:{queue}", "rq:queue:{queue}:*", "rq:queues:{queue}", "rq:workers:{queue}",
    "rq:worker:{queue}:*", "rq:clean_registries:{queue}", "rq:wip:{queue}", "rq:finished:{queue}",
    "rq:failed:{queue}", "rq:deferred:{queue}", "rq:scheduled:{queue}", "rq:canceled:{queue}",
    "rq:ready:{queue}",
    "rq:job:{job}*", "rq:job::{job}*", "rq:results:{job}*", "rq:execution:{job}*",
    "rq:executions:{job}*",
)  # fmt: skip
"""rq's keys of one queue and its jobs (`Keys.judge_queue`, `Keys.judge_jobs`)."""


def user_name(run: str, role: str) -> str:
    return f"{run}-{role}"


def is_of_role(user: str) -> bool:
    """Return whether `rolloutmq acl` printed a user of this name, for any run."""
    return user.rpartition("-")[2] in ROLES and "-" in user


def acl_line(run: str, role: str, password: str) -> str:
    """Return one line of an ACL file; it holds a hash of the password, never the password."""
    keys, chosen = Keys(run), ROLES[role]
    queue = keys.judge_queue
    secret = hashlib.sha256(password.encode()).hexdigest()
    # the server applies rules in order: these remove everything, the others add to it
    rules = [f"user {user_name(run, role)} on #{secret} resetchannels resetkeys -@all", _CONNECTION]
    if chosen.sees:
        rules += [
            f"&{keys.control} {_SUBSCRIBE}",
            f"%R~{keys.prefix}* %R~{LIMITS}*",
            # lengths and live judges, for doctor; the jobs themselves hold texts
            f"%R~rq:queue:{queue} %R~rq:workers:{queue} %R~rq:worker:{queue}:*",
            _READ,
            f"(~{keys.prefix}* ~{LIMITS}* +evalsha)",
        ]
    if chosen.writes:
        written = " ".join(f"~{keys.prefix}{name}" for name in chosen.writes)
        written += f" ~{LIMITS}*" if chosen.calls else ""
        rules.append(f"({written} {_WRITE})")
    if chosen.judging:
        found = " ".join(f"~{key.format(queue=queue, job=keys.judge_jobs)}" for key in _JUDGE_KEYS)
        rules.append(f"({found} {chosen.judging})")
    if not chosen.sees:  # the role judge runs rq's workers, which subscribe
        rules.append(f"&rq:pubsub:{queue}:* {_SUBSCRIBE}")
    return " ".join([*rules, *chosen.more])
