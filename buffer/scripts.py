"""The Lua scripts: one file per state change under `lua/`, each opening with its contract.

The contract is read, not only written: `KEYS[n] name` and `ARGV[n] name` of the header give the order in
which a caller's named keys and arguments are sent, so a caller cannot mix them up, and a test compares
header, body and callers. A name with `+` takes any number of values, which the caller passes as a tail.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from buffer.errors import ScriptError

Arg = str | int | float | bytes

_SLOT = re.compile(r"^-- (KEYS|ARGV)\[(\d+)(\+?)\] +(\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its contract."""

    name: str
    source: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    more_keys: bool
    more_args: bool

    @property
    def sha(self) -> str:
        return hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    def arrange(
        self,
        keys: Mapping[str, str],
        args: Mapping[str, Arg],
        tail_keys: Sequence[str] = (),
        tail_args: Sequence[Arg] = (),
    ) -> tuple[list[str], list[Arg]]:
        """KEYS and ARGV in the order of the header; ScriptError when a name is missing or unknown."""
        self._same("KEYS", self.keys, keys)
        self._same("ARGV", self.args, args)
        if (tail_keys and not self.more_keys) or (tail_args and not self.more_args):
            raise ScriptError(f"{self.name}.lua takes no more keys or arguments than it names")
        return [keys[n] for n in self.keys] + [*tail_keys], [args[n] for n in self.args] + [*tail_args]

    def _same(self, kind: str, wanted: tuple[str, ...], got: Mapping[str, object]) -> None:
        if set(wanted) != set(got):
            missing, unknown = set(wanted) - set(got), set(got) - set(wanted)
            raise ScriptError(f"{self.name}.lua: {kind} missing {sorted(missing)}, unknown {sorted(unknown)}")


def _slots(source: str, kind: str) -> tuple[tuple[str, ...], bool]:
    found = [(name, plus) for k, _, plus, name in _SLOT.findall(source) if k == kind]
    return tuple(name for name, plus in found if not plus), any(plus for _, plus in found)


def _assemble(name: str, prelude: str, body: str) -> Script:
    """The prelude goes behind the shebang; the script's name comes first, so that SLOWLOG can be read."""
    shebang, _, rest = body.partition("\n")
    keys, more_keys = _slots(body, "KEYS")
    args, more_args = _slots(body, "ARGV")
    source = f"{shebang}\n-- rolloutmq {name}\n{prelude}\n{rest}"
    return Script(name, source, keys, args, more_keys, more_args)


@cache
def library() -> dict[str, Script]:
    """All scripts by name."""
    folder = resources.files("buffer") / "lua"
    texts = {f.name.removesuffix(".lua"): f.read_text() for f in folder.iterdir() if f.name.endswith(".lua")}
    prelude = texts.pop("prelude")
    return {name: _assemble(name, prelude, body) for name, body in sorted(texts.items())}
