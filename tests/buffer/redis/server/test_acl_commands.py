"""Every command of two servers, tried by every role; and every key of others, by every command.

A command that is not in COMMANDS must be denied, so that a server with more of them adds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import redis

from buffer.redis.key_table import TABLE
from buffer.redis.keys import Keys
from buffer.redis.server.acl import ROLES, acl_line, user_name
from tests.buffer.redis.server.test_acl import PASSWORD, login_of, words
from tests.buffer.redis.server.test_acl_matrix import NAMES
from tests.servers import raw_client, start_server

SEES = "producer worker trainer viewer operator"
WRITES = "producer worker trainer operator"
QUEUE = "worker judge"
LOADS = "producer trainer operator"
EVERY = f"{SEES} judge"

COMMANDS = {
    # of one's own connection; the first four are not subject to any ACL
    "auth hello quit reset ping echo select asking readonly readwrite": EVERY,
    "client|caching client|capa client|getname client|getredir client|help client|id client|info": EVERY,
    "client|no-touch client|reply client|setinfo client|setname client|trackinginfo client|import-source": EVERY,
    "command command|count command|docs command|getkeys command|getkeysandflags command|help": EVERY,
    "command|info command|list": EVERY,
    # what kind of server it is, what time it has, and whether a write is safe
    "info time wait waitaof cluster|slots cluster|shards cluster|info": EVERY,
    # reading; the keys are those of the run
    "strlen getrange getbit bitcount mget hkeys hvals hstrlen lindex srandmember zcount zrank zmscore zrevrange": SEES,
    "zrevrangebyscore pttl dump evalsha": SEES,
    "exists type ttl get hget hmget hgetall hexists lrange llen lpos scard smembers sismember xlen": EVERY,
    "xrange xrevrange xread zcard zrange zscore zrangebyscore subscribe unsubscribe": EVERY,
    "hlen": SEES,
    # names of keys
    "scan": "trainer viewer operator",
    "script|load script|exists": LOADS,
    # writing
    "rename copy setrange setbit getdel lset ltrim xdel": WRITES,
    "del unlink expire pexpire persist set hset hsetnx hincrby hdel rpush lrem blpop sadd srem xadd zadd zrem": f"{WRITES} judge",
    "hincrbyfloat lpush lpop rpop lmove blmove zremrangebyscore xtrim": QUEUE,
    "multi exec discard watch unwatch": f"{QUEUE} operator",
    "publish": "trainer operator",
    "memory|usage": "operator",
}  # fmt: skip
"""Commands, and the roles that may run them on some key."""

OURS = "demo-1"
OTHERS = ("demo", "demo-", "demo-10", "demo-1.x", "demo_1", "demo.1", "emo-1", "other")
"""Names of other runs, some of which begin as this one does."""

FOREIGN = (
    "session:1", "rmq", "rmq:", "rmq:{", "rmq:{}:meta", "rmq:demo-1", "xrmq:{demo-1}:meta", "rq:queues", "rq:workers", "rq:suspended",
    "rq:groups", "rq:queue:default", "rq:queue:default:intermediate", "rq:job:4ddc3b5e", "rq:job::4ddc3b5e:dependencies",
    "rq:job:rmq-judge-demo-1", "rq:results:4ddc3b5e", "rq:execution:4ddc3b5e:1", "rq:executions:4ddc3b5e", "rq:worker:host.1",
    "rq:worker:rmq-judge:demo-1", "rq:wip:default", "rq:finished:default", "rq:failed:default", "rq:clean_registries:default",
    "rq:workers:default", "rq:scheduler-lock:default", "rq:cron_jobs", "rq:queue:rmq-judge",
)  # fmt: skip
"""Keys of other applications, and of none."""

CHANNELS = (
    "rq:pubsub:host.1", "__keyevent@0__:set", "news", "rq:pubsub:rmq-judge", "rmq:{demo}:control",
)  # fmt: skip


@pytest.fixture(scope="module", params=["valkey", "redis"])
def raw(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("commands")
    with start_server(request.param, folder) as server, server.connect() as client:
        for role in ROLES:
            client.execute_command("ACL", "SETUSER", *words(acl_line(OURS, role, PASSWORD)))
        client.url = server.url
        yield client


def arities(raw: Any) -> dict[str, tuple[int, int, int, int]]:
    """Return (arity, first key, last key, step) of each command and subcommand.

    Reads the plain reply: redis-py leaves out subcommands.
    """
    connection = raw.connection_pool.get_connection()
    try:
        connection.send_command("COMMAND")
        reply = connection.read_response()
    finally:
        raw.connection_pool.release(connection)
    found = {}
    for name, arity, _, first, last, step, *more in reply:
        subcommands = more[3] if len(more) > 3 else []
        for entry in [[name, arity, _, first, last, step], *subcommands]:
            found[entry[0].decode().lower()] = (entry[1], *entry[3:6])
        if subcommands and abs(arity) > 1:
            del found[name.decode().lower()]  # it never runs without one of them
    return found


def dry(raw: Any, tries: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return what the server says to each (user, command)."""
    said: list[str] = []
    waiting = list(tries)
    for start in range(0, len(waiting), 500):
        pipe: Any = raw.pipeline(transaction=False)
        for user, command in waiting[start : start + 500]:
            pipe.execute_command("ACL", "DRYRUN", user, *command)
        said += [
            answer.decode() if isinstance(answer, bytes) else str(answer)
            for answer in pipe.execute(raise_on_error=False)
        ]
    return said


def allowed(raw: Any, role: str, shapes: dict[str, tuple[int, int, int, int]]) -> set[str]:
    tries = [
        (user_name(OURS, role), [*name.split("|"), *["1"] * (abs(arity) - len(name.split("|")))])
        for name, (arity, *_) in shapes.items()
    ]
    found = set()
    for (_, command), said, name in zip(tries, dry(raw, tries), shapes, strict=True):
        assert "wrong number" not in said, (command, said)
        if f"to run the '{name}' command" not in said:
            # either it may run, or it is the key that is refused, which is asked for later
            assert said == "OK" or "key" in said or "channel" in said, (command, said)
            found.add(name)
    return found


def table(role: str) -> set[str]:
    return {
        name for names, roles in COMMANDS.items() if role in roles.split() for name in names.split()
    }


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_run_the_commands_of_the_table_and_no_other(raw: Any, role: str) -> None:
    shapes = arities(raw)
    assert len(shapes) > 300
    assert {"config|get", "function|load", "eval", "client|list"} <= set(shapes)
    assert allowed(raw, role, shapes) == table(role) & set(shapes)


def with_key(name: str, shape: tuple[int, int, int, int], key: str) -> list[str]:
    """Return a call of a command in which every key is `key`; [] for one without keys."""
    arity, first, last, step = shape
    if name == "evalsha":
        return [name, "0" * 40, "1", key]
    if name == "xread":
        return [name, "STREAMS", key, "0"]
    if not first:
        return []
    call = [*name.split("|"), *["1"] * (abs(arity) - len(name.split("|")))]
    end = len(call) + last if last < 0 else last
    call += ["1"] * (end + 1 - len(call))
    for place in range(first, end + 1, step):
        call[place] = key
    return call


def keys_of_others() -> list[str]:
    found = list(FOREIGN)
    for run in OTHERS:
        keys = Keys(run)
        found += [
            keys.prefix + re.sub(r"<(\w+)>", lambda place: NAMES[place[1]], kind) for kind in TABLE
        ]
        queue, jobs = keys.judge_queue, keys.judge_jobs
        found += [f"rq:queue:{queue}"]
        found += [
            f"rq:{kind}:{queue}" for kind in ("workers", "queues", "wip", "failed", "finished")
        ]
        found += [f"rq:worker:{queue}:host", f"rq:queue:{queue}:intermediate"]
        found += [f"rq:{kind}:{jobs}4ddc" for kind in ("job", "job:", "results", "execution")]
    return found


@pytest.mark.parametrize("role", ROLES)
def test_a_role_can_touch_no_key_of_another_run_or_application(raw: Any, role: str) -> None:
    shapes = arities(raw)
    user = user_name(OURS, role)
    names = sorted(table(role) & set(shapes))
    own = f"rq:queue:{Keys(OURS).judge_queue}" if role == "judge" else Keys(OURS).group("g")
    assert dry(raw, [(user, ["EXISTS", own])]) == ["OK"]
    tries = [
        (user, call)
        for key in keys_of_others()
        for name in names
        if (call := with_key(name, shapes[name], key))
    ]
    assert len(tries) > 3_000
    said = dry(raw, tries)
    assert [
        call for (_, call), answer in zip(tries, said, strict=True) if "key" not in answer
    ] == []


@pytest.mark.parametrize("role", ROLES)
def test_a_role_can_use_no_channel_of_another_run_or_application(raw: Any, role: str) -> None:
    user = user_name(OURS, role)
    tries = [
        (user, [verb, channel, *(["x"] if "PUBLISH" in verb else [])])
        for verb in ("SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE", "PUBLISH", "SPUBLISH")
        for channel in (*CHANNELS, *(Keys(run).control for run in OTHERS))
    ]
    assert "OK" not in dry(raw, tries)


REFUSALS = (
    "no permission",
    "ACL failure in script",
    "The user executing the script",
    "not allowed",
)
SECRETS = {"requirepass": "of the server", "masterauth": "of its primary"}
PLOTS = (
    "return redis.call('CONFIG', 'GET', 'requirepass')", "return redis.call('GET', 'rmq:{other}:meta')",
    "redis.setresp(3) return redis.call('RPUSH', 'rq:queue:default', 'x')", "return redis.call('FLUSHALL')",
    "return redis.call('FUNCTION', 'FLUSH')", "return redis.call('EVAL', 'return 1', 0)", "return redis.call('SCAN', 0)",
)  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_a_role_reads_no_secret_and_runs_nothing_that_is_not_loaded(raw: Any, role: str) -> None:
    """For real: with passwords that are set, and with scripts that somebody else has loaded."""
    raw.set("rmq:{other}:meta", "theirs")
    for name, value in SECRETS.items():
        raw.config_set(name, value)
    plots = [raw.script_load(plot) for plot in PLOTS]
    try:
        with raw_client(login_of(raw.url, OURS, role)) as client:
            for words_ in (
                ("CONFIG", "GET", *SECRETS), ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("ACL", "GETUSER", "default"),
                ("EVAL", "return 1", "0"), ("FCALL", "x", "0"), ("FUNCTION", "DUMP"), ("CLIENT", "LIST"), ("MONITOR",),
                *(("EVALSHA", plot, "0") for plot in plots[:-1]),
            ):  # fmt: skip
                with pytest.raises(redis.ResponseError, match="|".join(REFUSALS)):
                    pytest.fail(f"{words_}: {client.execute_command(*words_)}")
            if role not in LOADS.split():
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.script_load("return 2")
    finally:
        for name in SECRETS:
            raw.config_set(name, "")
    assert raw.get("rmq:{other}:meta") == b"theirs"
