"""Builds that must be caught: all scripts, with one line of one of them gone or changed.

Only such lines as a run of a minute must miss: that take cuts at the staleness limit, for one, hardly shows where
everybody expires what is too old. Every line that keeps an invariant has a story in tests/buffer/invariants.
"""

from __future__ import annotations

from collections.abc import Mapping

from buffer.scripts import Script, assemble, sources

MUTATIONS = {
    "zombies-submit": ("submit", "if held[4] ~= token or stage ~= 'running' then return {'FENCED'} end\n", ""),
    "batch-stays-in-pool": ("prelude", "  redis.call('ZREM', pool, unpack(members))\n", ""),
    "batch-is-no-record": (
        "take_batch",
        "if redis.call('EXISTS', batch) == 1 then return {'OK', unpack(redis.call('LRANGE', batch, 0, -1))} end\n",
        "",
    ),
    "reaped-and-gone": ("reap", "    local place = retry_or_bury(keys, gid, max_tries, reason)\n",
                        "    local place = 'waiting'\n"),
    "cursor-stays": ("enqueue", "'cursor', int(cursor + drawn), ", ""),
}  # fmt: skip
"""Name: (file, what is there, what takes its place)."""


def scripts_of(name: str) -> Mapping[str, Script]:
    """All scripts of the mutated build `name`."""
    file, old, new = MUTATIONS[name]
    texts = sources()
    assert texts[file].count(old) == 1, f"{file}.lua has no longer exactly one {old!r}"
    texts[file] = texts[file].replace(old, new)
    return assemble(texts)
