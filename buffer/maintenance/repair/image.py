"""All that a server holds of a run: the value of every key but payloads, and the sizes of those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from buffer.redis.keys import Keys
from buffer.redis.store import Store

PAGE = 500
"""Keys in one round trip."""

Hash = dict[str, str]
ZSet = dict[str, float]
Entry = tuple[str, str, str]
"""One waiting job: its id in the stream, gid and payload."""


class Value(NamedTuple):
    """A value by its Redis type; streams are those of jobs."""

    kind: str
    data: Any


class Payload(NamedTuple):
    """The chunks of one payload: number and bytes; `expires` if it was not accepted yet."""

    chunks: int
    size: int
    expires: bool


Payloads = Mapping[tuple[str, str], Payload]
"""By gid and token."""


class Image:
    """Contains the values of a run by what follows its prefix.

    A key that is missing, or has another type than is asked for, reads as empty. Nothing that is
    returned is a copy.
    """

    def __init__(self, values: dict[str, Value], payloads: Payloads, foreign: list[str]) -> None:
        self.values = values
        self.payloads = payloads
        self.foreign = foreign
        """keys of payloads that hold something else"""

    def hash(self, name: str) -> Hash:
        """Return the fields of a hash."""
        found: Hash = self._data(name, "hash", {})
        return found

    def zset(self, name: str) -> ZSet:
        """Return the members of a sorted set with their scores."""
        found: ZSet = self._data(name, "zset", {})
        return found

    def lines(self, name: str) -> list[str]:
        """Return the elements of a list."""
        found: list[str] = self._data(name, "list", [])
        return found

    def members(self, name: str) -> set[str]:
        """Return the members of a set."""
        found: set[str] = self._data(name, "set", set())
        return found

    def stream(self, name: str) -> list[Entry]:
        """Return the jobs of a stream, in order."""
        found: list[Entry] = self._data(name, "stream", [])
        return found

    def bits(self, name: str) -> set[int]:
        """Return the numbers of the bits that are set in a bitmap."""
        data: bytes = self._data(name, "string", b"")
        found: set[int] = set()
        for byte, value in enumerate(data):
            if value:
                found.update(8 * byte + bit for bit in range(8) if value & 0x80 >> bit)
        return found

    def below(self, prefix: str) -> Iterator[str]:
        """Yield what follows `prefix` in the names that begin with it."""
        for name in self.values:
            if name.startswith(prefix):
                yield name.removeprefix(prefix)

    def _data(self, name: str, kind: str, default: Any) -> Any:
        value = self.values.get(name)
        return value.data if value and value.kind == kind else default


def read_image(store: Store, keys: Keys) -> Image:
    """Read all keys of a run; O(keys of the server). The caller watches that none changes."""
    values: dict[str, Value] = {}
    chunks: dict[tuple[str, str], dict[int, tuple[int, bool]]] = {}
    foreign: list[str] = []
    for _, client in store.servers.masters():
        names = (key.decode() for key in client.scan_iter(keys.pattern, count=PAGE))
        while page := list(islice(names, PAGE)):
            payloads = [name for name in page if "}:payload:" in name]
            index = [name for name in page if name.startswith(keys.prefix)]
            foreign += _read_sizes(client, keys, payloads, chunks)
            others = [name for name in index if "}:payload:" not in name]
            values |= _read_values(client, keys, others)
    payloads_found = {name: _payload(parts) for name, parts in chunks.items()}
    return Image(values, payloads_found, foreign)


UNREAD = ("events", "weights:")
"""Names of keys of which only the type is read: a repair does not need them."""


def _read_values(client: Any, keys: Keys, names: Sequence[str]) -> dict[str, Value]:
    kinds = [kind.decode() for kind in _each(client, lambda pipe, name: pipe.type(name), names)]
    pairs = [(name, kind) for name, kind in zip(names, kinds, strict=True) if kind in _READ]
    unread = tuple(keys.prefix + name for name in UNREAD)
    known = [(name, kind) for name, kind in pairs if not name.startswith(unread)]
    pipe = client.pipeline(transaction=False)
    for name, kind in known:
        _READ[kind](pipe, name)
    data = pipe.execute()
    return {
        name.removeprefix(keys.prefix): Value(kind, _PARSE[kind](raw))
        for (name, kind), raw in zip(known, data, strict=True)
    } | {
        name.removeprefix(keys.prefix): Value(kind, b"unread")
        for name, kind in pairs
        if name.startswith(unread)
    }


def _read_sizes(
    client: Any,
    keys: Keys,
    names: Sequence[str],
    chunks: dict[tuple[str, str], dict[int, tuple[int, bool]]],
) -> list[str]:
    """Add the sizes of payloads by chunk; return the keys that hold none."""
    kinds = _each(client, lambda pipe, name: pipe.type(name), names)
    strings = [name for name, kind in zip(names, kinds, strict=True) if kind == b"string"]
    sizes = _each(client, lambda pipe, name: pipe.strlen(name), strings)
    expiries = _each(client, lambda pipe, name: pipe.pttl(name), strings)
    for name, size, expiry in zip(strings, sizes, expiries, strict=True):
        gid, token, chunk = _payload_name(keys, name)
        chunks.setdefault((gid, token), {})[chunk] = (size, expiry > 0)
    return sorted(set(names) - set(strings))


def _each(client: Any, ask: Callable[[Any, str], object], names: Sequence[str]) -> Sequence[Any]:
    pipe = client.pipeline(transaction=False)
    for name in names:
        ask(pipe, name)
    return list(pipe.execute())


def _payload_name(keys: Keys, name: str) -> tuple[str, str, int]:
    """Return gid, token and chunk of a payload key; the gid of a spread one is in its hash tag."""
    tag, _, rest = name.partition("}:payload:")
    parts = rest.split(":")
    if keys.spread:
        parts.insert(0, tag.removeprefix(keys.spread_prefix))
    gid, token, chunk = [*parts, "", "0"][:3] if len(parts) < 3 else parts[:3]
    return gid, token, int(chunk) if chunk.isdecimal() else 0


def _payload(parts: dict[int, tuple[int, bool]]) -> Payload:
    is_whole = set(parts) == set(range(len(parts)))
    size = sum(size for size, _ in parts.values())
    return Payload(
        len(parts) if is_whole else 0, size, any(expires for _, expires in parts.values())
    )


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _job(entry: tuple[bytes, dict[bytes, bytes]]) -> Entry:
    number, fields = entry
    fields = fields or {}
    return _text(number), _text(fields.get(b"gid", b"")), _text(fields.get(b"payload", b""))


_READ: Mapping[str, Callable[[Any, str], object]] = {
    "hash": lambda pipe, name: pipe.hgetall(name),
    "zset": lambda pipe, name: pipe.zrange(name, 0, -1, withscores=True),
    "list": lambda pipe, name: pipe.lrange(name, 0, -1),
    "set": lambda pipe, name: pipe.smembers(name),
    "stream": lambda pipe, name: pipe.xrange(name),
    "string": lambda pipe, name: pipe.get(name),
}

_PARSE: Mapping[str, Callable[[Any], Any]] = {
    "hash": lambda raw: {_text(name): _text(value) for name, value in raw.items()},
    "zset": lambda raw: {_text(member): score for member, score in raw},
    "list": lambda raw: [_text(value) for value in raw],
    "set": lambda raw: {_text(value) for value in raw},
    "stream": lambda raw: [_job(entry) for entry in raw],
    "string": lambda raw: raw or b"",
}
