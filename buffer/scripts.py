"""The Lua scripts: one file per state change under `lua/`, each opening with its contract.

The contract is read, not only written (`script_header.py`): names in the header give the order in which a caller's
keys and arguments are sent, so a caller cannot mix them up, and types and bounds are enforced on the server before a
script reads or writes. A slot with `+` takes many values, which the caller passes as a tail.
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

_SHARED = ("prelude", "types")
"""Lua whose functions, a paragraph each, are put in front of the scripts that use them."""

_DECLARED = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_WORD = re.compile(r"\w+")


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


def _assemble(name: str, shared: Sequence[str], body: str) -> Script:
    """The script's name comes first, so that SLOWLOG can be read; then what is shared, the guard, the body."""
    shebang, _, rest = body.partition("\n")
    header = Header.parse(body)
    own = [header.guard(), rest]
    parts = [shebang, f"-- rolloutmq {name}", f"local SCRIPT = '{name}'", *_used(shared, "\n".join(own)), *own]
    return Script(name, "\n".join(parts), header)


def _used(shared: Sequence[str], own: str) -> list[str]:
    """The functions of what is shared that a script uses: in every call of it, Lua makes all that are there anew."""
    used: list[str] = []
    words = set(_WORD.findall(own))
    for function in reversed([part for text in shared for part in text.split("\n\n")]):  # each uses what is above it
        if words & {name for line in _DECLARED.findall(function) for name in line.split(", ")}:
            used.insert(0, function)
            words |= set(_WORD.findall(function))
    return used


def sources() -> dict[str, str]:
    """The files under `lua/` by name."""
    folder = resources.files("buffer") / "lua"
    return {f.name.removesuffix(".lua"): f.read_text() for f in folder.iterdir() if f.name.endswith(".lua")}


def assemble(texts: Mapping[str, str]) -> dict[str, Script]:
    """The scripts that these files make, by name."""
    shared = [texts[name] for name in _SHARED]
    return {name: _assemble(name, shared, body) for name, body in sorted(texts.items()) if name not in _SHARED}


@cache
def library() -> dict[str, Script]:
    """All scripts by name."""
    return assemble(sources())
