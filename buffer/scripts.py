"""The Lua scripts: one file per state change under `lua/`, each opening with its contract.

`script_header.py` reads the contract: names in the header give the order in which a caller's keys and arguments are
sent, so a caller cannot mix them up, and types and bounds are enforced on the server before a script reads or writes.

`-- include: clock, events` in a header puts `lua/include/clock.lua` and `events.lua` in front of the script, each file
once and behind the files that it includes itself. In every call, Lua makes all functions of a script anew: an include
file holds the functions of one topic that are used together.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from buffer.errors import ScriptError
from buffer.script_header import Header

Arg = str | int | float | bytes

_INCLUDE = re.compile(r"^-- include: (.+)$", re.MULTILINE)
_FOLDER = "include/"


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its contract."""

    name: str
    source: str
    header: Header

    @property
    def sha(self) -> str:
        return _sha(self.source)

    @property
    def starts_work(self) -> bool:
        """Whether a server refuses it when its memory is full: it frees none, and no work waits for it (I12)."""
        return self.source.startswith("#!lua\n")

    def text(self, verb: str) -> str:
        """What EVALSHA or EVAL names the script by."""
        return self.sha if verb == "EVALSHA" else self.source

    def arrange(
        self,
        keys: Mapping[str, str],
        args: Mapping[str, Arg],
        tail_keys: Sequence[str] = (),
        tail_args: Sequence[Arg] = (),
    ) -> tuple[list[str], list[Arg]]:
        """KEYS and ARGV in the order of the header; ScriptError when a name is missing or unknown."""
        key_names, arg_names = self.header.fixed("KEYS"), self.header.fixed("ARGV")
        self._same("KEYS", key_names, keys)
        self._same("ARGV", arg_names, args)
        if (tail_keys and not self.header.tail("KEYS")) or (tail_args and not self.header.tail("ARGV")):
            raise ScriptError(f"{self.name}.lua takes no more keys or arguments than it names")
        return [keys[n] for n in key_names] + [*tail_keys], [args[n] for n in arg_names] + [*tail_args]

    def _same(self, array: str, wanted: tuple[str, ...], got: Mapping[str, object]) -> None:
        if len(wanted) != len(got) or not all(map(got.__contains__, wanted)):
            missing, unknown = set(wanted) - set(got), set(got) - set(wanted)
            raise ScriptError(f"{self.name}.lua: {array} missing {sorted(missing)}, unknown {sorted(unknown)}")


@cache
def _sha(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def includes(text: str) -> list[str]:
    """Return the names of the files that a Lua file includes."""
    return [name for line in _INCLUDE.findall(text) for name in line.split(", ")]


def _assemble(name: str, texts: Mapping[str, str]) -> Script:
    """Put the script's name first, so that SLOWLOG can be read; then its includes, the guard and the body."""
    shebang, _, rest = texts[name].partition("\n")
    header = Header.parse(texts[name])
    guard = header.guard()
    included: dict[str, str] = {}
    _include([*header.checks(), *includes(rest)], texts, included)
    parts = [shebang, f"-- rolloutmq {name}", f"local SCRIPT = '{name}'", *included.values(), guard, rest]
    return Script(name, "\n".join(parts), header)


def _include(names: Sequence[str], texts: Mapping[str, str], included: dict[str, str]) -> None:
    """Add the named files to `included`, each behind the files that it includes."""
    for name in names:
        if name not in included:
            text = texts.get(_FOLDER + name)
            if text is None:
                raise ScriptError(f"there is no lua/include/{name}.lua")
            _include(includes(text), texts, included)
            included[name] = text


def sources() -> dict[str, str]:
    """Return the files under `lua/` by name; those to include are named `include/<topic>`."""
    lua = resources.files("buffer") / "lua"
    found = {}
    for prefix, folder in (("", lua), (_FOLDER, lua / "include")):
        for file in folder.iterdir():
            if file.name.endswith(".lua"):
                found[prefix + file.name.removesuffix(".lua")] = file.read_text()
    return found


def assemble(texts: Mapping[str, str]) -> dict[str, Script]:
    """Return the scripts that these files make, by name."""
    names = [name for name in sorted(texts) if not name.startswith(_FOLDER)]
    return {name: _assemble(name, texts) for name in names}


@cache
def library() -> dict[str, Script]:
    """Return all scripts by name."""
    return assemble(sources())
