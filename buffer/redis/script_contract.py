"""Parse and enforce the contract of a Lua script, which is its header.

    -- KEYS control HASH*, groups prefix, events STREAM
    -- KEYS jobs, progress  STREAM*, HASH x1..256  pairs in the order in which to serve them
    -- ARGV nonce      token   of the producer
    -- ARGV limit      1..512  groups at most
    -- ARGV threshold  ''|0..  stale threshold in steps
    -- ARGV strict     0|1
    -- ARGV lane  eval|resume|fresh xKEYS  of each pair

    -- ARGV gid       gid     x1..64  of each result
    -- ARGV size      0..     x1..64  bytes of its payload

Callers send the values in the order of the lines. A key has a Redis type, or is a prefix; its name
identifies it (`SLOTS` in `buffer/redis/keys.py`). An argument has one type, or several with `|`
between: a word, `''` (empty), a range of integers (`0..` ends at 2^53 - 1), `text..N` (at most N
bytes of UTF-8), `bytes..N`, or a type in NAMED or JUDGED below. The rest of the line is a comment.

Every name is a local of the script: an integer is a number (nil where it is empty), `0|1` is false
or true, everything else is a string. Convert a number with `int` before you store it: Redis may
write 1e+8.

A line with a number of units (`x0..64`; `xKEYS`: as many as KEYS has) is a tail, the last of its
array. A tail of one name is a list of that name. Walk a tail of several names unit by unit;
arguments with `xKEYS` come with the keys of their unit:

    for n, jobs, progress, lane in each_unit do

Lines of ARGV with the same number are one tail; its units are tables in the list `units`:

    for n, one in ipairs(units) do … one.gid … one.size

The prologue of a script that writes refuses a run that was removed, which it finds by the key
`meta` beside its first one (`missing_run` in `lua/shared/control.lua`). A script that names `meta`
decides itself what it does without one.

The prologue reads the length of a key (0.5 microseconds) to find a wrong type before anything is
written. `HASH*` leaves that to Redis, for scripts that run for every group: the body reads this key
before it writes anything, or the key only carries a hint and is written last. A script reads keys
with a prefix, or their length, before it writes. A test puts a wrong type at every key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from buffer.errors import ScriptError

LENGTH_OF = {
    "HASH": "HLEN",
    "ZSET": "ZCARD",
    "SET": "SCARD",
    "LIST": "LLEN",
    "STREAM": "XLEN",
    "STRING": "STRLEN",
}
"""The command that returns the length of each type in O(1), and fails on other types."""

NAMED = {
    "gid": (75, "[%w_.-]+%-00[0-6]%d%d%d%d%d%d%d"),
    "hex": (8, "[0-9a-f]+"),
    "name": (64, "[%w_.-]+"),
    "sampled": (84, "%d+ %d+ %d+ %d+ %d+"),
    "token": (64, "[%w_.:-]+"),
    "weights": (80, "[%w_.-]+:%d+"),
}
"""Types of arguments by name: the most bytes, and a pattern of Lua.

`name` is that of a task, a worker, a lineage or a field. The draw of a gid is an offset in a
bitmap, so its pattern bounds the memory (70,000,000 draws are 8.75 MB).
"""

JUDGED = ("ages", "lanes", "number")  # types with a check `is_<name>` in `lua/shared/values.lua`

BIGGEST = 2**53 - 1  # the largest integer that is exact in Lua

_SLOT = re.compile(
    r"^-- (?P<array>KEYS|ARGV) +(?P<names>\w+(?:, \w+)*)"
    r" +(?P<types>[^ ,\n]+(?:, [^ ,\n]+)*?)"
    r"(?: +x(?:(?P<least>\d+)\.\.(?P<most>\d+)|(?P<like>KEYS)))?(?: +(?! |x[\dK]).*)?$",
    re.MULTILINE,
)
_PAIRS = re.compile(r"^-- KEYS (\w+ +[a-zA-Z]+\*?(?:, \w+ +[a-zA-Z]+\*?)+)$", re.MULTILINE)
_RANGE = re.compile(r"([\d_]+)\.\.([\d_]*)")
_TEXT = re.compile(r"text\.\.(\d+)")
_BYTES = re.compile(r"bytes\.\.(\d+)")


@dataclass(frozen=True, slots=True)
class Slot:
    """One line of a header. A tail has `least` to `most` units; None: as many as KEYS has."""

    array: str
    first: int
    is_tail: bool
    names: tuple[str, ...]
    types: tuple[str, ...]
    least: int = 1
    most: int | None = 1
    is_table: bool = False
    """its units are tables in the list `units`"""

    def joined(self, other: Slot, line: str) -> Slot:
        """Return the tail that goes on with the next line. Raises ScriptError."""
        if (self.least, self.most) != (other.least, other.most):
            raise ScriptError(f"nothing follows a tail: {line}")
        names, types = self.names + other.names, self.types + other.types
        return replace(self, names=names, types=types, is_table=True)

    def lines(self) -> list[str]:
        """Return Lua that checks all values of this slot, and declares the local of a fixed one."""
        if not self.is_tail:
            return self._check(f"{self.array}[{self.first}]", 0, self.names[0])
        at = [
            f"{self.array}[i + {offset}]" if offset else f"{self.array}[i]"
            for offset in range(len(self.names))
        ]
        names = self.names if self.is_table else ("",) * len(at)
        found = zip(at, range(len(at)), names, strict=True)
        checks = [
            line for value, offset, name in found for line in self._check(value, offset, name)
        ]
        loop = [f"for i = {self.first}, #{self.array}, {len(self.names)} do", *checks, "end"]
        if self.is_table:
            fields = ", ".join(f"{name} = {name}" for name in names)
            return ["local units = {}", *loop[:-1], f"units[#units + 1] = {{{fields}}}", "end"]
        return loop if checks else []

    def _check(self, at: str, offset: int, local: str = "") -> list[str]:
        """Return Lua that checks the value `at`, the offset-th of a unit, and declares `local`."""
        kind = self.types[offset]
        if self.array == "KEYS":
            return [f"call('{LENGTH_OF[kind]}', {at})"] if kind in LENGTH_OF else []
        words = kind.split("|")
        shown = kind.replace("'", "\\'")
        refused = f"return refuse('{self.names[offset]}', '{shown}', {at}) end"
        if local and (number := _number(kind, at)):
            others = "".join(
                f" or {_accepts(word, at)}" for word in words if not _RANGE.fullmatch(word)
            )
            return [f"local {local} = {number}", f"if not ({local}{others}) then {refused}"]
        check = f"if not ({' or '.join(_accepts(word, at) for word in words)}) then {refused}"
        return [check, f"local {local} = {self.value(offset, at)}"] if local else [check]

    def value(self, offset: int, at: str) -> str:
        """Return Lua that converts the checked value `at`, the offset-th of a unit."""
        kind = self.types[offset]
        if self.array == "ARGV" and _number(kind, at):
            return f"tonumber({at})"
        return f"{at} == '1'" if kind == "0|1" else at


def _number(kind: str, at: str) -> str:
    """Return Lua for the value `at` as a number or nil; "" for a type that is no integer."""
    ranges = [word for word in kind.split("|") if _RANGE.fullmatch(word)]
    return _accepts(ranges[0], at) if ranges else ""


def _accepts(kind: str, at: str) -> str:
    """Return Lua that is true if the value `at` is of one kind of argument."""
    if match := _RANGE.fullmatch(kind):
        return f"as_int({at}, {int(match[1])}, {int(match[2] or BIGGEST)})"
    if match := _TEXT.fullmatch(kind):
        return f"is_text({at}, {match[1]})"
    if match := _BYTES.fullmatch(kind):
        return f"#{at} <= {match[1]}"
    if kind in NAMED:
        most, pattern = NAMED[kind]
        return f"#{at} <= {most} and find({at}, '^{pattern}$')"
    if kind in JUDGED:
        return f"is_{kind}({at})"
    return f"{at} == {kind}" if kind == "''" else f"{at} == '{kind}'"


# eq=False: there is one header of each script, so identity is equality, and its hash is cheap
@dataclass(frozen=True, slots=True, eq=False)
class ScriptHeader:
    slots: tuple[Slot, ...]
    writes: bool

    @classmethod
    def parse(cls, body: str) -> ScriptHeader:
        """Parse the header of a script. Raises ScriptError for a malformed line."""
        # a line of several keys stands for a line of each
        body = _PAIRS.sub(
            lambda line: "\n".join(map("-- KEYS {}".format, line[1].split(", "))), body
        )
        matches = list(_SLOT.finditer(body))
        if len(matches) != len(re.findall(r"^-- (?:KEYS|ARGV)\b", body, re.MULTILINE)):
            raise ScriptError(f"a line of this header cannot be read: {body.splitlines()[1]}")
        slots: list[Slot] = []
        for match in matches:
            before = [slot for slot in slots if slot.array == match["array"]]
            slot = _slot(match, len(before) + 1)
            if before and before[-1].is_tail:
                slots.remove(before[-1])
                slot = before[-1].joined(slot, match[0])
            slots.append(slot)
        return cls(tuple(slots), writes="no-writes" not in body.partition("\n")[0])

    @cache  # noqa: B019 (there are as many headers as scripts, and they stay)
    def fixed(self, array: str) -> tuple[str, ...]:
        """Return the names of KEYS or ARGV in order, without a tail."""
        return tuple(
            slot.names[0] for slot in self.slots if slot.array == array and not slot.is_tail
        )

    @cache  # noqa: B019
    def tail(self, array: str) -> Slot | None:
        return next((slot for slot in self.slots if slot.array == array and slot.is_tail), None)

    @cache  # noqa: B019
    def tail_names(self, array: str) -> tuple[str, ...]:
        tail = self.tail(array)
        return tail.names if tail else ()

    def prologue(self) -> str:
        """Return Lua that refuses the first wrong key or argument, and declares the locals."""
        lines = [*self._counts("KEYS"), *self._counts("ARGV")]
        meta = next((slot for slot in self.slots if slot.names == ("meta",)), None)
        # `HASH*`: this script creates the run, so the run may be missing
        if self.writes and self.fixed("KEYS") and not (meta and meta.types == ("HASH*",)):
            lines.append(f"local missing = missing_run(KEYS[1], {'true' if meta else 'false'})")
            lines.append("if missing then return missing end")
        # arguments first: their checks need no command
        for slot in sorted(self.slots, key=lambda slot: slot.array):
            if slot.array == "KEYS" and not self.writes:
                continue  # a read-only script may find a wrong type while it reads
            lines += slot.lines()
        return "\n".join([*lines, *self._locals()])

    def _locals(self) -> Iterator[str]:
        if names := self.fixed("KEYS"):
            values = ", ".join(f"KEYS[{number}]" for number in range(1, len(names) + 1))
            yield f"local {', '.join(names)} = {values}"
        tails = [tail for array in ("KEYS", "ARGV") if (tail := self.tail(array))]
        # a tail of ARGV with xKEYS is walked together with that of KEYS
        are_joined = any(tail.most is None for tail in tails)
        several = (tail for tail in tails if are_joined or len(tail.names) > 1)
        units = [tail for tail in several if not tail.is_table]
        assert are_joined or len(units) < 2, "two tails of units in one script"
        for tail in tails:
            if tail not in units and not tail.is_table:
                yield f"local {tail.names[0]} = {{unpack({tail.array}, {tail.first})}}"
        if not units:
            return
        # an iterator of a `for` loop: the number of a unit, then its values
        found = []
        yield "local function each_unit(_, n)"
        yield "n = (n or 0) + 1"
        for tail in units:
            index, width = tail.array[0].lower(), len(tail.names)
            yield f"local {index} = {tail.first - width} + n * {width}"
            at = [
                f"{tail.array}[{index} + {offset}]" if offset else f"{tail.array}[{index}]"
                for offset in range(width)
            ]
            found += [tail.value(offset, value) for offset, value in enumerate(at)]
        array = units[0].array
        yield f"if {array}[{array[0].lower()}] then return n, {', '.join(found)} end"
        yield "end"

    def _counts(self, array: str) -> Iterator[str]:
        fixed = len(self.fixed(array))
        tail = self.tail(array)
        if tail is None:
            good = f"#{array} == {fixed}"
            want = str(fixed)
        elif tail.most is None:
            keys = self.tail("KEYS")
            assert keys, "xKEYS without a tail of KEYS"
            before = len(self.fixed("KEYS"))
            width = len(tail.names)
            unit = len(keys.names)
            good = f"(#{array} - {fixed}) * {unit} == (#KEYS - {before}) * {width}"
            want = f"{fixed} and {width} for each {unit} KEYS from {before + 1} on"
        else:
            width = len(tail.names)
            good = f"is_count(#{array} - {fixed}, {width}, {tail.least}, {tail.most})"
            want = f"{fixed} and {tail.least} to {tail.most} times {width}"
        yield f"if not ({good}) then return refuse('number of {array}', '{want}', #{array}) end"


def _slot(match: re.Match[str], first: int) -> Slot:
    names = tuple(match["names"].split(", "))
    types = tuple(match["types"].split(", "))
    is_tail = bool(match["most"] or match["like"])
    if (
        len(names) != len(types)
        or (len(names) > 1 and not is_tail)
        or not all(_is_type(match["array"], kind) for kind in types)
    ):
        raise ScriptError(f"this line of a header is no contract: {match[0]}")
    least = int(match["least"] or 0)
    most = int(match["most"]) if match["most"] else None
    return Slot(match["array"], first, is_tail, names, types, *((least, most) if is_tail else ()))


def _is_type(array: str, kind: str) -> bool:
    if array == "KEYS":
        return kind == "prefix" or kind.removesuffix("*") in LENGTH_OF
    # a single word begins an explanation, behind an argument without a type
    return "|" in kind or not _accepts(kind, "").startswith(" ==")
