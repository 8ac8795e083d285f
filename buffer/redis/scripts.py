"""The Lua scripts: one file per state change under `lua/`, each with its contract as header.

`-- include: clock, events` in a header puts `lua/include/clock.lua` and `events.lua` before the
script, each once and behind the files that it includes itself. Lua creates all functions of a
script anew in every call, so an include file holds only functions that are used together.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Protocol

from buffer.errors import ScriptError
from buffer.redis.connection.bulk_io import Command
from buffer.redis.script_contract import ScriptHeader

Arg = str | int | float | bytes


class KeysByName(Protocol):
    """Keys of a script by the names in its header: `SlotKeys`, or a dictionary."""

    def __getitem__(self, slot: str, /) -> str: ...


_INCLUDE = re.compile(r"^-- include: (.+)$", re.MULTILINE)
_FOLDER = "include/"


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    source: str
    header: ScriptHeader

    @property
    def sha(self) -> str:
        """Return the hash by which EVALSHA names the script."""
        return _sha(self.source)

    @property
    def starts_work(self) -> bool:
        """Return whether a full server refuses this: it frees no memory, no work needs it (I12)."""
        return self.source.startswith("#!lua\n")

    def command(
        self,
        keys: KeysByName,
        args: Mapping[str, Arg],
        tail_keys: Sequence[str | KeysByName] = (),
        tail_args: Sequence[Arg] = (),
    ) -> Command:
        """Return the EVALSHA of a call, in the order of the header. Raises ScriptError.

        `tail_keys` are keys, or the keys of a unit by name.
        """
        header = self.header
        names = header.fixed("ARGV")
        if len(names) != len(args) or not all(map(args.__contains__, names)):
            missing = set(names) - set(args)
            unknown = set(args) - set(names)
            raise ScriptError(
                f"{self.name}.lua: ARGV missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        if (tail_keys and not header.tail("KEYS")) or (tail_args and not header.tail("ARGV")):
            raise ScriptError(f"{self.name}.lua takes no more keys or arguments than it names")
        try:
            all_keys = [keys[slot] for slot in header.fixed("KEYS")]
            unit_slots = header.tail_names("KEYS")
            for unit in tail_keys:
                all_keys += [unit] if isinstance(unit, str) else [unit[slot] for slot in unit_slots]
        except KeyError as missing_key:
            raise ScriptError(f"{self.name}.lua: KEYS missing {missing_key}") from None
        values = [args[name] for name in names]
        return ("EVALSHA", self.sha, len(all_keys), *all_keys, *values, *tail_args)


@cache
def _sha(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def includes(text: str) -> list[str]:
    return [name for line in _INCLUDE.findall(text) for name in line.split(", ")]


def _assemble(name: str, texts: Mapping[str, str]) -> Script:
    """Join name (first, so that SLOWLOG shows it), includes, checks of the header, and body."""
    shebang, _, rest = texts[name].partition("\n")
    header = ScriptHeader.parse(texts[name])
    included: dict[str, str] = {}
    _include([*header.checks(), *includes(rest)], texts, included)
    parts = [
        shebang,
        f"-- rolloutmq {name}",
        f"local SCRIPT = '{name}'",
        *included.values(),
        header.prologue(),
        rest,
    ]
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
                found[prefix + file.name.removesuffix(".lua")] = file.read_text(encoding="utf-8")
    return found


def assemble(texts: Mapping[str, str]) -> dict[str, Script]:
    names = [name for name in sorted(texts) if not name.startswith(_FOLDER)]
    return {name: _assemble(name, texts) for name in names}


@cache
def library() -> dict[str, Script]:
    return assemble(sources())
