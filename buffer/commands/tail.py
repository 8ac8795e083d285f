"""`rolloutmq tail`: what happens in a run, one line per transition, as it happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.text import Text

from buffer.commands.screen import console, emit_line, plain
from buffer.commands.snapshot import Event, parse_event
from buffer.commands.target import AsJson, RedisUrl, RunDir, RunName, open_target
from buffer.run import Run

EPILOG = "Example: rolloutmq tail --json | jq 'select(.event == \"reaped\")'"

_BLOCK_MS = 1000
_STYLES = {
    "completed": "green",
    "committed": "green",
    "aborted": "yellow",
    "expired": "yellow",
    "released": "yellow",
    "control": "cyan",
    "weights": "cyan",
    "reaped": "red",
    "reasserted": "red",
    "restored": "red",
    "dissolved": "red",
    "ledger_reset": "red",
    "worker_lost": "red",
    "worker_fenced": "red",
}


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(tail)


def tail(
    from_start: Annotated[bool, typer.Option("--from-start", help="From the oldest event that is kept.")] = False,
    events: Annotated[int | None, typer.Option("--count", min=1, help="Leave after so many events.")] = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Follow the events of a run; Ctrl-C leaves."""
    with open_target(redis_url, run_dir, run) as target:
        screen = console()
        for number, (identity, event) in enumerate(follow(target.run, from_start=from_start), start=1):
            if as_json:
                emit_line({"id": identity, "ms": event[0], "event": event[1]} | event[2])
            else:
                screen.print(event_text(event), soft_wrap=True)
            if number == events:
                return


def follow(run: Run, *, from_start: bool) -> Iterator[tuple[str, Event]]:
    """(id, event) for ever. Starts at the oldest event, or behind the newest one there is now."""
    last = "0" if from_start else _newest(run)
    while True:
        for entry in _read(run, last):
            last = entry[0].decode()
            yield last, parse_event(entry)


def _newest(run: Run) -> str:
    found: Any = run.store.retrying("tail", lambda: run.store.control.xrevrange(run.keys.events, count=1))
    return found[0][0].decode() if found else "0"


def _read(run: Run, last: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    key = run.keys.events
    reply: Any = run.store.retrying("tail", lambda: run.store.control.xread({key: last}, count=500, block=_BLOCK_MS))
    if not reply:
        return []
    entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
    # RESP3 wraps the entries of a stream in one more list
    return list(entries[0]) if entries and isinstance(entries[0], list) else list(entries)


def event_text(event: Event) -> Text:
    """`16:43:05.123 completed     gid math-0000000042  version 3`"""
    ms, name, fields = event
    clock = time.strftime("%H:%M:%S", time.localtime(ms / 1000)) + f".{ms % 1000:03d}"
    text = Text.assemble((f"{clock} ", "dim"), (f"{plain(name):<14}", _STYLES.get(name, "")))
    for field, value in fields.items():
        text.append(f" {plain(field)} ", style="dim")
        text.append(plain(value))
    return text
