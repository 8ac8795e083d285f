"""A store that, before it makes a call, makes every wrong version of it and notes what was not
refused.

What fits an argument is said here a second time, in Python, so that header and Lua are not judged
by themselves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from buffer.ledger.account import Account
from buffer.limits import RunLimits
from buffer.redis.keys import Keys
from buffer.redis.script_contract import Slot
from buffer.redis.scripts import Arg, Script, library
from buffer.redis.store import RunContext, Store
from tests.buffer.faulty_store import FaultyStore
from tests.buffer.keyspace import exact
from tests.buffer.time_machine import Moment, put_back, remember

Call = tuple[str, list[str], list[bytes]]
"""What is wrong with it, its keys and its arguments."""

VISITS = 2
"""Calls of each script that are tried out."""

ABSURD = (
    *(
        b"", b"no such word", b"-1", b"-5", b"01", b"+1", b" 1", b"1 ", b"1.5", b"0x10", b"1e3",
        b"nan", b"inf", b"-inf",
    ),
    *(
        b"1e999", b"9" * 20, b"7\x00", b"7\n", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\xaf",
        b"a b", b"a:b:c", b"{}",
    ),
    *(b"x" * 300, b"eval  evil", b"math-9999999999", b"math-1", b"bucket:999"),
)  # fmt: skip

WORDS = {
    "bucket": r"bucket:\d\d?", "gid": r"[\w.-]+-00[0-6]\d{7}", "hex": r"[0-9a-f]{1,8}",
    "lanes": r"((eval|resume|fresh)( |$))*", "name": r"[\w.-]{1,64}",
    "names": r"[A-Za-z0-9][\w,-]{0,511}", "number": r"-?\d{1,25}(\.\d*)?(e[+-]?\d{1,2})?",
    "policy": r"[\w.:-]{1,256}", "token": r"[\w.:-]{1,64}", "weights": r"[\w.-]{1,64}:\d{1,15}",
}  # fmt: skip

NEW = {
    ("create_run", "nonce"), ("create_run", "continues"), ("trainer_open", "nonce"),
    ("producer_open", "nonce"), ("register", "nonce"),
}  # fmt: skip
NEW |= {
    ("claim", "token"),
    ("put", "token"),
    ("update", "token"),
    ("permit", "caller"),
    ("keep_verdict", "digest"),
}
"""Tokens that a caller makes up: a script takes any. So it is with every `operation`."""

HINTS = ("bell", "events")


def fits(kind: str, value: bytes) -> bool:
    """Whether a value is of a type of the headers."""
    return any(_is(one, value) for one in kind.split("|"))


def _is(kind: str, value: bytes) -> bool:
    if match := re.fullmatch(r"(text|bytes)\.\.(\d+)", kind):
        return len(value) <= int(match[2]) and (
            match[1] == "bytes" or value.decode(errors="ignore").encode() == value
        )
    if match := re.fullmatch(r"([\d_]+)\.\.([\d_]*)", kind):
        is_integer = re.fullmatch(rb"0|[1-9]\d{0,15}", value) is not None
        return is_integer and int(match[1]) <= int(value) <= int(match[2] or 2**53 - 1)
    if kind in WORDS:
        return re.fullmatch(WORDS[kind], value.decode(errors="replace"), re.ASCII) is not None
    return value == kind.strip("'").encode()


def bad_values(kind: str) -> Iterator[bytes]:
    """Values that are not of a type, those next to its bounds among them."""
    bounds = [int(n) for n in re.findall(r"[\d_]+", kind) if ".." in kind]
    near = [b"%d" % (n + d) for n in bounds for d in (-1, 1)] + [
        b"x" * (n + 1) for n in bounds if "text" in kind
    ]
    yield from (value for value in (*ABSURD, *near) if not fits(kind, value))


class HostileStore(FaultyStore):
    """`faults`: what a script did not refuse, by name of the script."""

    one_by_one = True

    def __init__(self, url: str, raw: redis.Redis, run: str) -> None:
        super().__init__(url, raw, run=run)
        self.tried: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self.faults: dict[str, list[str]] = {name: [] for name in library()}

    def look(self, script: Script, keys: list[str], args: list[Arg]) -> None:
        self.visits[script.name] += 1
        if self.visits[script.name] <= VISITS:
            self._try_all(script, keys, [_as_bytes(arg) for arg in args])

    def _try_all(self, entry: Script, keys: list[str], args: list[bytes]) -> None:
        before = self._state()
        self._refused(
            entry, [*_wrong_arguments(entry, keys, args), *_wrong_numbers(entry, keys, args)]
        )
        self._unchanged(entry, "a refused call", before)
        self._try_unknown_tokens(entry, keys, args, before)
        self._try_wrong_types(entry, keys, args, before)
        self._try_wrong_records(entry, keys, args)

    def _state(self) -> dict[str, Any]:
        return exact(self.raw, self.run)

    def _refused(self, entry: Script, calls: Sequence[Call]) -> None:
        self.tried[entry.name] += len(calls)
        pipe = self.raw.pipeline(transaction=False)
        for _, keys, args in calls:
            pipe.evalsha(entry.sha, len(keys), *keys, *args)
        for (what, _, _), reply in zip(calls, pipe.execute(raise_on_error=False), strict=True):
            if not str(reply).startswith(f"RMQ_ARG {entry.name}: "):
                self.faults[entry.name].append(f"{what}: {str(reply)[:200]}")

    def _unchanged(self, entry: Script, what: str, before: dict[str, Any], but: str = "") -> None:
        after = self._state()
        names = (before.keys() | after.keys()) - {but}
        changed = [key for key in names if before.get(key) != after.get(key)]
        if changed:
            self.faults[entry.name].append(f"{what} changed {changed}")

    def _try_unknown_tokens(
        self, entry: Script, keys: list[str], args: list[bytes], before: dict[str, Any]
    ) -> None:
        for place, name, kind in _places(entry, "ARGV", len(args)):
            is_free = (entry.name, name) in NEW or name == "operation" or not args[place]
            if "token" not in kind.split("|") or is_free:
                continue
            reply = self.raw.evalsha(
                entry.sha, len(keys), *keys, *args[:place], b"nobody", *args[place + 1 :]
            )
            if reply[0] == b"OK":
                self.faults[entry.name].append(f"an unknown {name}: {reply}")
            self._unchanged(entry, f"an unknown {name}", before)

    def _try_wrong_types(
        self, entry: Script, keys: list[str], args: list[bytes], before: dict[str, Any]
    ) -> None:
        moment = remember(self.raw, self.run)
        for place, name, kind in _places(entry, "KEYS", len(keys)):
            if kind == "prefix":
                continue
            error = self._with_wrong_type(entry, place, kind, keys, args)
            if kind.endswith("*"):
                # Redis finds it while the body runs, if the body gets there
                if error and name.startswith(HINTS):
                    self._adds_up(entry, name)
                elif error:
                    self._unchanged(entry, f"{name} of a wrong type", before, but=keys[place])
                put_back(self.raw, self.run, moment)
                continue
            if not error and entry.header.writes:
                self.faults[entry.name].append(f"{name} may be of a wrong type")
            self._restore(keys[place], moment)
        self._unchanged(entry, "a key of a wrong type", before)

    def _try_wrong_records(self, entry: Script, keys: list[str], args: list[bytes]) -> None:
        """Every second key under a prefix is of a wrong type, so that good and bad ones meet in one
        call.
        """
        moment = remember(self.raw, self.run)
        for place, name, kind in _places(entry, "KEYS", len(keys)):
            if kind != "prefix":
                continue
            named = {
                keys[place] + arg.decode() for arg in args if name == "groups" and fits("gid", arg)
            }
            records = sorted({key for key in moment if key.startswith(keys[place])} | named)
            for odd in (0, 1):
                for record in records[odd::2]:
                    self._spoil(record, is_list=name in ("batches", "manifests"))
                before = self._state()
                if self._fails(entry, keys, args):
                    self._unchanged(entry, f"{name} of a wrong type", before)
                put_back(self.raw, self.run, moment)

    def _with_wrong_type(
        self, entry: Script, place: int, kind: str, keys: list[str], args: list[bytes]
    ) -> bool:
        """Put a wrong type at one key and make the call; whether it failed."""
        self._spoil(keys[place], is_list=kind.rstrip("*") == "LIST")
        return self._fails(entry, keys, args)

    def _spoil(self, key: str, is_list: bool = False) -> None:
        self.raw.delete(key)
        self.raw.set(key, "x") if is_list else self.raw.rpush(key, "x")

    def _fails(self, entry: Script, keys: list[str], args: list[bytes]) -> bool:
        try:
            self.raw.evalsha(entry.sha, len(keys), *keys, *args)
        except redis.ResponseError as error:
            return str(error).startswith("WRONGTYPE")
        return False

    def _restore(self, key: str, moment: Moment) -> None:
        self.raw.delete(key)
        if key in moment:
            value, ttl = moment[key]
            self.raw.restore(key, ttl, value)

    def _adds_up(self, entry: Script, name: str) -> None:
        """A hint that could not be given is not a move that was half made."""
        limits = RunLimits.from_meta(
            {k.decode(): v.decode() for k, v in self.raw.hgetall(Keys(self.run).meta).items()}
        )
        with_store = Store(self.url, deadline_s=5.0)
        faults = Account(RunContext(with_store, Keys(self.run), limits)).totals().faults
        with_store.close()
        self.faults[entry.name] += [f"without {name}: {fault}" for fault in faults]


def _wrong_arguments(entry: Script, keys: list[str], args: list[bytes]) -> Iterator[Call]:
    for place, name, kind in _places(entry, "ARGV", len(args)):
        for value in bad_values(kind):
            wrong = [*args[:place], value, *args[place + 1 :]]
            yield f"{name} = {value[:30]!r}", keys, wrong


def _wrong_numbers(entry: Script, keys: list[str], args: list[bytes]) -> Iterator[Call]:
    """Keys and arguments that are missing or too many."""
    for fewer in {min(1, len(args)), len(args)} - {0}:
        if not _number_fits(entry, len(keys), len(args) - fewer):
            yield f"{fewer} arguments fewer", keys, args[:-fewer]
    if not _number_fits(entry, len(keys) - 1, len(args)):
        yield "a key fewer", keys[:-1], args
    yield "thousands of keys", keys + [keys[0]] * 3000, args
    yield "thousands of arguments", keys, args + [b"1"] * 9000


def _as_bytes(arg: Arg) -> bytes:
    return arg if isinstance(arg, bytes) else str(arg).encode()


def _places(entry: Script, array: str, number: int) -> Iterator[tuple[int, str, str]]:
    """(place from 0 on, name, type) of every fixed value, and of the first unit of a tail."""
    for slot in entry.header.slots:
        if slot.array == array:
            for offset, (name, kind) in enumerate(zip(slot.names, slot.types, strict=True)):
                if slot.first - 1 + offset < number:
                    yield slot.first - 1 + offset, name, kind


def _number_fits(entry: Script, keys: int, args: int) -> bool:
    header = entry.header
    units = [
        _units(header.tail(array), number - len(header.fixed(array)))
        for array, number in (("KEYS", keys), ("ARGV", args))
    ]
    tail = header.tail("ARGV")
    return None not in units and (tail is None or tail.most is not None or units[0] == units[1])


def _units(tail: Slot | None, left: int) -> int | None:
    """How many units a tail has; None if that cannot be."""
    if tail is None:
        return 0 if left == 0 else None
    units, rest = divmod(left, len(tail.names))
    return (
        None
        if rest or units < tail.least or (tail.most is not None and units > tail.most)
        else units
    )
