"""Damages one key of a run: deletes it, renames it, gives it another type, or changes one field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from tests.buffer.keyspace import run_keys

JUNK = b"?!"


class Harm(NamedTuple):
    """One way to damage one key; `how` is a word or two."""

    key: str
    how: str
    do: Callable[[Any], object]

    @property
    def name(self) -> str:
        """The key without the prefix of the run."""
        return self.key.partition("}:")[2]

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    def __str__(self) -> str:
        return f"{self.name} {self.how}"


def every_harm(client: Any, run: str) -> Iterator[Harm]:
    for key in sorted(run_keys(client, run)):
        kind = client.type(key).decode()
        yield Harm(key, "deleted", partial(_delete, key))
        yield Harm(key, "renamed", partial(_rename, key))
        yield Harm(key, "of another type", partial(_change_type, key, kind))
        yield from _changes(client, key, kind)


def _delete(key: str, client: Any) -> None:
    client.delete(key)


def _rename(key: str, client: Any) -> None:
    client.rename(key, key + "x")


def _change_type(key: str, kind: str, client: Any) -> None:
    client.delete(key)
    client.sadd(key, "x") if kind == "list" else client.rpush(key, "x")


def _changes(client: Any, key: str, kind: str) -> Iterator[Harm]:
    for how, command, *parts in _commands(client, key, kind):
        yield Harm(key, how, partial(_execute, command, key, parts))


def _execute(command: str, key: str, parts: list[Any], client: Any) -> None:
    client.execute_command(command, key, *parts)


def _commands(client: Any, key: str, kind: str) -> Iterator[tuple[Any, ...]]:
    """What is changed, in words, and the command that does it, without the key."""
    match kind:
        case "hash":
            for field, value in sorted(client.hgetall(key).items()):
                yield from _of_a_field(field, value)
        case "zset":
            ((member, score),) = client.zrange(key, 0, 0, withscores=True)
            yield ("member removed", "ZREM", member)
            yield ("member moved", "ZADD", 12345, member)
            yield ("member junk", "ZADD", score, JUNK)
        case "list":
            yield ("first junk", "LSET", 0, JUNK)
            yield ("last junk", "LSET", -1, JUNK)
            yield ("last removed", "RPOP")
        case "stream":
            for entry, _ in client.xrange(key, count=1):
                yield ("entry removed", "XDEL", entry)
            yield ("entry junk", "XADD", "*", "x", "y")
        case "set":
            yield ("member removed", "SREM", sorted(client.smembers(key))[0])
            yield ("member junk", "SADD", JUNK)
        case _:
            yield ("cut", "SET", client.get(key)[:-1])


def _of_a_field(field: bytes, value: bytes) -> Iterator[tuple[Any, ...]]:
    name = field.decode()
    yield (f"{name} deleted", "HDEL", field)
    yield (f"{name} junk", "HSET", field, JUNK)
    if value.lstrip(b"-").isdigit():
        yield (f"{name} +1", "HSET", field, int(value) + 1)
        yield (f"{name} -1", "HSET", field, int(value) - 1)
