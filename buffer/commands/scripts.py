"""`rolloutmq scripts`: the Lua scripts as a server runs them, for clients in other languages."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import typer

from buffer.commands.screen import console, emit, plain, table
from buffer.commands.target import AsJson
from buffer.keys import Keys
from buffer.limits import SCHEMA
from buffer.script_header import Slot
from buffer.scripts import Script, library, sources

OF_A_WORKER = ("register", "heartbeat", "claim", "submit", "release", "deregister")
"""Scripts whose keys are named: what is needed to write a worker in another language."""

EPILOG = "Example: rolloutmq scripts --json > scripts.json"


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(scripts)


def scripts(as_json: AsJson = False) -> None:
    """List the Lua scripts: one per state change.

    With --json: source, SHA1, keys and arguments of each, which is all that a client in another language needs. Keys
    of a worker's scripts are named: what stands behind rmq:{RUN}:
    """
    if as_json:
        emit({"schema": SCHEMA, "scripts": {name: _as_json(script) for name, script in library().items()}})
        return
    grid = table("script", "SHA1", "arguments")
    for name, script in library().items():
        grid.add_row(plain(name), script.sha, plain(" ".join(script.header.fixed("ARGV"))))
    console().print(grid)


def _as_json(script: Script) -> dict[str, Any]:
    slots = {array: [_slot(slot) for slot in script.header.slots if slot.array == array] for array in ("KEYS", "ARGV")}
    if script.name in OF_A_WORKER:
        for slot in slots["KEYS"]:
            if not slot["tail"]:
                slot["key"] = _key(slot["names"][0])
    after_shebang = sources()[script.name].splitlines()[1:]
    contract = [line.removeprefix("-- ") for line in takewhile(lambda line: line.startswith("-- "), after_shebang)]
    return {
        "sha": script.sha,
        "keys": slots["KEYS"],
        "args": slots["ARGV"],
        "contract": contract,
        "source": script.source,
    }


def _key(slot: str) -> str:
    """Return what stands behind `rmq:{RUN}:`, with `<task>` and `<worker>` to be filled in."""
    keys = Keys("any")
    return keys.slots(task="<task>", worker="<worker>")[slot].removeprefix(keys.prefix)


def _slot(slot: Slot) -> dict[str, Any]:
    """`tail`: as many values (of each name, in turn) as the caller likes, within the bounds of the contract. `default`:
    what a caller says who has nothing to say, where there is such a thing."""
    said = {"names": slot.names, "types": slot.types, "tail": slot.is_tail}
    if slot.array == "ARGV" and not slot.is_tail and (default := _default(slot.types[0])) is not None:
        return said | {"default": default}
    return said


def _default(kind: str) -> str | None:
    if "''" in kind.split("|"):
        return ""
    return "0" if kind == "number" or kind.startswith("0..") else None
