"""In a cluster, bytes lie in other slots than the script that accepts them: it believes its caller, and lists them.

They were written with an expiry. Whoever called the script keeps them from expiring right after it; where that process
died first, any janitor does, long before they expire. Each step is harmless when it is repeated (I13). Where
`wait_replicas` is set, those of every node are waited for before the script is called, and before the list forgets what
was pinned. Else bytes may be lost with their node: who reads them misses them (PayloadMissing), never silently, and
they are made again.
"""

from __future__ import annotations

from buffer.bulk import Command
from buffer.keys import Keys
from buffer.store import Store

PIN = 200
"""Payloads that one round pins."""

PROMPT = "-prompt"
"""Ends the token of a prompt that came with a group from outside: it becomes the group's `init`."""


def pin_listed(store: Store, keys: Keys) -> int:
    """Keep listed payloads from expiring; returns how many there were. More may be left if it is PIN."""
    if not keys.spread:
        return 0
    (found,) = store.each("pin", [("SRANDMEMBER", keys.unpinned, PIN)])
    if not found:
        return 0
    parts = [entry.decode().split(" ") for entry in found]
    commands: list[Command] = []
    for gid, token, chunks in parts:
        commands += [("PERSIST", name) for name in keys.payload_chunks(gid, token, int(chunks))]
    _name_prompts(store, keys, [(gid, token) for gid, token, _ in parts if token.endswith(PROMPT)])
    store.each("pin", commands, on_payloads=True)
    store.each("pin", [("SREM", keys.unpinned, *found)])
    return len(found)


def _name_prompts(store: Store, keys: Keys, prompts: list[tuple[str, str]]) -> None:
    """Give prompts the name under which their groups look for them, as the script does where it may."""
    copies = [("COPY", keys.payload(gid, token), keys.payload(gid, "init")) for gid, token in prompts]
    store.each("pin", copies, on_payloads=True)
    found = store.each("pin", [("EXISTS", keys.group(gid)) for gid, _ in prompts])
    # of a group that has ended meanwhile, the copy expires as what it was made from does
    living = [gid for (gid, _), is_there in zip(prompts, found, strict=True) if is_there]
    store.each("pin", [("PERSIST", keys.payload(gid, "init")) for gid in living], on_payloads=True)
    store.each("pin", [("UNLINK", keys.payload(gid, token)) for gid, token in prompts])
