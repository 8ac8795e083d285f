"""The page of all Redis keys, from `buffer.redis.key_table` and the scripts' headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from buffer.errors import ScriptError
from buffer.redis.key_table import TABLE, KeyRow
from buffer.redis.keys import Keys
from buffer.redis.scripts import library
from docs.reference.markdown import table

INTRODUCTION = """\
# Every Redis key

All keys of a run begin with `rmq:{RUN}:`, where `RUN` is the name of the run and the braces are a
cluster hash tag: they lie in one slot. "Names in scripts" are those in the headers of the Lua
scripts (`python -m buffer.redis.script_list`); a name with an asterisk is a prefix, which the
script completes. Trainer and operator may write every key, other roles those of "written by".
`save` copies what is saved; the rest belongs to living processes. The same questions as commands
are in [Commands](commands.md).

Keys of a limit on calls (`limit…`, and `bell:` of its callers) belong to no run, and begin with
`rmq-limit:{NAME}:`.
"""

PLACEHOLDERS = {
    "task": "<task>",
    "lane": "<lane>",
    "status": "<status>",
    "gid": "<gid>",
    "worker": "<id>",
    "ledger": "<name>",
    "step": "<step>",
    "lineage": "<lineage>",
    "version": "<version>",
}
"""The facts from which the keys of a script are built, as `TABLE` writes them."""


def key_reference() -> str:
    """Return the page of the keys of a run."""
    return "\n".join([INTRODUCTION, _keys(TABLE, sorted(_script_names()))])


def _keys(rows: Mapping[str, KeyRow], names: list[tuple[str, str]]) -> str:
    header = ["key", "type", "holds", "written by", "saved", "names in scripts"]
    cells = [
        [
            *(f"`{pattern}`", row.type, row.holds, ", ".join(row.writers)),
            "yes" if row.saved else "no",
            ", ".join(_names_of(pattern, names)),
        ]
        for pattern, row in rows.items()
    ]
    columns = len(header) if names else -1
    return table(header[:columns], [line[:columns] for line in cells])


def _names_of(pattern: str, names: list[tuple[str, str]]) -> Iterator[str]:
    key_of_pattern = re.compile(re.sub(r"<\w+>", "[^:]+", pattern))
    for name, key in names:
        if key_of_pattern.fullmatch(key):
            yield f"`{name}`"
        elif key.endswith(":") and pattern.startswith(key):
            yield f"`{name}*`"


def _script_names() -> Iterator[tuple[str, str]]:
    """Yield the names of keys in the headers of scripts, each with its key behind the prefix."""
    keys = Keys("any")
    slots = keys.slots(**PLACEHOLDERS)
    headers = [script.header for script in library().values()]
    in_headers = [slot for header in headers for slot in header.slots if slot.array == "KEYS"]
    for name in {name for slot in in_headers for name in slot.names}:
        try:
            yield name, slots[name].removeprefix(keys.prefix)
        except ScriptError:
            continue  # a list of payloads or pools, which the caller names
