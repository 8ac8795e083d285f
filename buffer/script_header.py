"""The header of a Lua script is its contract, and this file makes the contract hold.

    -- KEYS[1] control   HASH*
    -- KEYS[5] groups    prefix of the group records (HASH)
    -- KEYS[7+] jobs, progress  STREAM*, HASH x1..256  pairs in the order in which they are to be served
    -- ARGV[1] nonce     token        of the producer
    -- ARGV[6] limit     1..512       groups at most
    -- ARGV[7] threshold ''|0..       stale threshold in steps
    -- ARGV[8+] lane     eval|resume|fresh xKEYS  of each pair

A key has a Redis type, or is a prefix. An argument has a type: alternatives with `|` between: a word, `''` (empty),
a range of integers (`0..` ends at 2^53 - 1), `text..N` (N bytes of UTF-8 at most), `bytes..N`, or one that is NAMED or
JUDGED below. A slot with `+` takes a tail of units, one value of each of its names per unit, and says how many
(`x0..64`; `xKEYS`: as many as KEYS has). What follows is for people.

A wrong type of a key is found by asking for its length (0.5 microseconds), before anything is written. Scripts that run
for every group leave that to Redis where they can: `HASH*` says that the body reads this key before it writes
anything, or that it only carries a hint and is written last. What lies under a prefix a script reads, or asks for its
length, before it writes. A test puts a wrong type at every key of every script.

`Header.guard` is Lua that refuses what does not fit, before the script reads or writes anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from buffer.errors import ScriptError

LENGTH_OF = {"HASH": "HLEN", "ZSET": "ZCARD", "SET": "SCARD", "LIST": "LLEN", "STREAM": "XLEN", "STRING": "STRLEN"}
"""For each type of key the command that says its length, in O(1), and that fails on any other type."""

NAMED = {
    "bucket": (9, "bucket:%d%d?"),
    "gid": (75, "[%w_.-]+%-00[0-6]%d%d%d%d%d%d%d"),
    "hex": (8, "[0-9a-f]+"),
    "name": (64, "[%w_.-]+"),
    "policy": (256, "[%w_.:-]+"),
    "token": (64, "[%w_.:-]+"),
    "weights": (80, "[%w_.-]+:%d+"),
}
"""Types of arguments by name: bytes at most, and a pattern of Lua. A name is of a task, a worker, a lineage or a field.
The draw of a gid is an offset in a bitmap: an absurd one would cost memory (70,000,000 are 8.75 MB)."""

JUDGED = ("lanes", "number")
"""Types of arguments that have a check of their own, `lua/include/is_<name>.lua`."""

BIGGEST = 2**53 - 1
"""The largest integer that is exact in Lua."""

_SLOT = re.compile(
    r"^-- (?P<array>KEYS|ARGV)\[(?P<first>\d+)(?P<tail>\+?)\] +(?P<names>\w+(?:, \w+)*)"
    r" +(?P<types>[^ ,\n]+(?:, [^ ,\n]+)*?)(?: x(?:(?P<least>\d+)\.\.(?P<most>\d+)|(?P<like>KEYS)))?(?: .*)?$",
    re.MULTILINE,
)
_RANGE = re.compile(r"([\d_]+)\.\.([\d_]*)")
_TEXT = re.compile(r"text\.\.(\d+)")
_CHECK = re.compile(r"\bis_\w+(?=\()")
_BYTES = re.compile(r"bytes\.\.(\d+)")


@dataclass(frozen=True, slots=True)
class Slot:
    """One line of a header. `least` and `most` units in a tail; None: as many as KEYS has."""

    array: str
    first: int
    is_tail: bool
    names: tuple[str, ...]
    types: tuple[str, ...]
    least: int = 1
    most: int | None = 1

    def lines(self) -> list[str]:
        """Lua that checks all values of this slot."""
        if not self.is_tail:
            return self._check(f"{self.array}[{self.first}]", 0)
        at = [f"{self.array}[i + {offset}]" if offset else f"{self.array}[i]" for offset in range(len(self.names))]
        checks = [line for offset, value in enumerate(at) for line in self._check(value, offset)]
        return [f"for i = {self.first}, #{self.array}, {len(self.names)} do", *checks, "end"] if checks else []

    def _check(self, at: str, offset: int) -> list[str]:
        """Lua that checks the value `at`, the offset-th of a unit."""
        kind = self.types[offset]
        if self.array == "KEYS":
            return [f"call('{LENGTH_OF[kind]}', {at})"] if kind in LENGTH_OF else []
        good, shown = " or ".join(_accepts(word, at) for word in kind.split("|")), kind.replace("'", "\\'")
        return [f"if not ({good}) then return refuse('{self.names[offset]}', '{shown}', {at}) end"]


def _accepts(kind: str, at: str) -> str:
    """Lua that is true if the value `at` is of one kind of argument."""
    if match := _RANGE.fullmatch(kind):
        return f"is_int({at}, {int(match[1])}, {int(match[2] or BIGGEST)})"
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


@dataclass(frozen=True, slots=True, eq=False)  # there is one of each script: compared by identity, so cheaply hashed
class Header:
    """The contract of one script."""

    slots: tuple[Slot, ...]
    writes: bool

    @classmethod
    def parse(cls, body: str) -> Header:
        """Read the header of a script. Raises ScriptError for a line that is none."""
        slots = tuple(map(_slot, _SLOT.finditer(body)))
        if len(slots) != len(re.findall(r"^-- (?:KEYS|ARGV)\[", body, re.MULTILINE)):
            raise ScriptError(f"a line of this header cannot be read: {body.splitlines()[1]}")
        return cls(slots, writes="no-writes" not in body.partition("\n")[0])

    @cache  # noqa: B019 (there are as many headers as scripts, and they stay)
    def fixed(self, array: str) -> tuple[str, ...]:
        """The names of KEYS or ARGV in order, without a tail."""
        return tuple(slot.names[0] for slot in self.slots if slot.array == array and not slot.is_tail)

    @cache  # noqa: B019
    def tail(self, array: str) -> Slot | None:
        return next((slot for slot in self.slots if slot.array == array and slot.is_tail), None)

    def type_of(self, place: int) -> str:
        """The Redis type that KEYS[place] has, counted from 1; "PREFIX" for a prefix."""
        slot = max((s for s in self.slots if s.array == "KEYS" and s.first <= place), key=lambda s: s.first)
        return slot.types[(place - slot.first) % len(slot.types)].rstrip("*").upper()

    def guard(self) -> str:
        """Lua that returns an error reply for the first key or argument that does not fit."""
        lines = [*self._counts("KEYS"), *self._counts("ARGV")]
        # the arguments first: they cost no command
        for slot in sorted(self.slots, key=lambda slot: slot.array):
            if slot.array == "KEYS" and not self.writes:
                continue  # a read-only script may find a wrong type while it reads
            lines += slot.lines()
        return "do\n" + "\n".join(lines) + "\nend"

    def checks(self) -> list[str]:
        """Return the files under `lua/include` that the guard needs: each check is a file of its name."""
        return ["refuse", *sorted(set(_CHECK.findall(self.guard())))]

    def _counts(self, array: str) -> Iterator[str]:
        fixed, tail = len(self.fixed(array)), self.tail(array)
        if tail is None:
            good, want = f"#{array} == {fixed}", str(fixed)
        elif tail.most is None:
            keys = self.tail("KEYS")
            assert keys, "xKEYS without a tail of KEYS"
            before = len(self.fixed("KEYS"))
            good = f"(#{array} - {fixed}) * {len(keys.names)} == (#KEYS - {before}) * {len(tail.names)}"
            want = f"{fixed} and {len(tail.names)} for each {len(keys.names)} KEYS from {before + 1} on"
        else:
            width = len(tail.names)
            good = f"is_count(#{array} - {fixed}, {width}, {tail.least}, {tail.most})"
            want = f"{fixed} and {tail.least} to {tail.most} times {width}"
        yield f"if not ({good}) then return refuse('number of {array}', '{want}', #{array}) end"


def _slot(match: re.Match[str]) -> Slot:
    names, types = tuple(match["names"].split(", ")), tuple(match["types"].split(", "))
    is_tail, bounded = bool(match["tail"]), bool(match["most"] or match["like"])
    is_known = _is_key_type if match["array"] == "KEYS" else _is_argument_type
    if len(names) != len(types) or is_tail != bounded or not all(map(is_known, types)):
        raise ScriptError(f"this line of a header is no contract: {match[0]}")
    least, most = int(match["least"] or 0), int(match["most"]) if match["most"] else None
    return Slot(match["array"], int(match["first"]), is_tail, names, types, *((least, most) if is_tail else ()))


def _is_key_type(kind: str) -> bool:
    return kind == "prefix" or kind.removesuffix("*") in LENGTH_OF


def _is_argument_type(kind: str) -> bool:
    # a lone word is the first of an explanation whose argument got no type
    return "|" in kind or not _accepts(kind, "").startswith(" ==")
