"""All scripts as JSON, for clients in other languages.

    python -m buffer.redis.script_list > scripts.json

Of each: source, SHA1, keys and arguments. Keys of a worker's scripts are given without their prefix
`rmq:{RUN}:`; producer_workers/PROTOCOL.md says how they are called.
"""

from __future__ import annotations

import sys
from itertools import takewhile
from typing import Any

import orjson

from buffer.limits import SCHEMA
from buffer.redis.keys import Keys
from buffer.redis.script_contract import Slot
from buffer.redis.scripts import Script, library, sources

OF_A_WORKER = ("register", "heartbeat", "reconcile", "claim", "submit", "release", "deregister")


def _as_json(script: Script) -> dict[str, Any]:
    slots = {
        array: [_slot(slot) for slot in script.header.slots if slot.array == array]
        for array in ("KEYS", "ARGV")
    }
    if script.name in OF_A_WORKER:
        keys = Keys("any")
        names = keys.slots(task="<task>", worker="<worker>")
        for slot in slots["KEYS"]:
            if not slot["tail"]:
                slot["key"] = names[slot["names"][0]].removeprefix(keys.prefix)
    after_shebang = sources()[script.name].splitlines()[1:]
    contract = [
        line.removeprefix("-- ")
        for line in takewhile(lambda line: line.startswith("-- "), after_shebang)
    ]
    return {
        "sha": script.sha,
        "keys": slots["KEYS"],
        "args": slots["ARGV"],
        "contract": contract,
        "source": script.source,
    }


def _slot(slot: Slot) -> dict[str, Any]:
    """Describe a slot of KEYS or ARGV; a `tail` takes any number of values, within the contract.

    `default` is the value to pass for "none"; `defaults`: of each name in a tail.
    """
    document: dict[str, Any] = {"names": slot.names, "types": slot.types, "tail": slot.is_tail}
    if slot.array == "ARGV":
        defaults = [_default(kind) for kind in slot.types]
        if slot.is_tail:
            document["defaults"] = defaults
        elif defaults[0] is not None:
            document["default"] = defaults[0]
    return document


def _default(kind: str) -> str | None:
    if "''" in kind.split("|"):
        return ""
    return "0" if kind == "number" or kind.startswith("0..") else None


if __name__ == "__main__":
    scripts = {name: _as_json(script) for name, script in library().items()}
    sys.stdout.buffer.write(orjson.dumps({"schema": SCHEMA, "scripts": scripts}))
