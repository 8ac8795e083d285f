"""`rolloutmq workers`: who generates, and in what state."""

from __future__ import annotations

import typer
from rich.table import Table
from rich.text import Text

from buffer.commands.screen import age, console, count, emit, plain, state, table, worker_state
from buffer.commands.target import AsJson, RedisUrl, RunDir, RunName, open_target
from buffer.worker_record import WHOLE

EPILOG = "Example: rolloutmq workers --json | jq '.[].tokens_per_s'"

_NUMBERS = (*WHOLE, "silent_ms", "holds", "bad_groups", "barred_for_ms")


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(workers)


def workers(redis_url: RedisUrl = None, run_dir: RunDir = None, run: RunName = None, as_json: AsJson = False) -> None:
    """List the workers of a run.

    With engine, state, weights, time since the last heartbeat, groups held and how many it would
    hold, requests in the engine (load), tokens per second, groups done, groups that
    failed or that a trainer could not use (bad). One that is barred claims nothing more until
    `rolloutmq continue --worker ID`. Then how long their judges take, and how often these failed.
    """
    with open_target(redis_url, run_dir, run) as target:
        rows = target.run.fleet.workers()
        lease_ms, weights = target.run.limits.lease_ms, str(target.run.control.state().weights)
    if as_json:
        emit([_as_json(row, lease_ms) for row in rows])
    elif not rows:
        console().print("No worker has joined. Start one with: rolloutmq worker CONFIG")
    else:
        console().print(workers_table(rows, lease_ms, weights))
        if judging := [row for row in rows if row.get("judged", "0") != "0"]:
            console().print(judges_table(judging))


def workers_table(rows: list[dict[str, str]], lease_ms: int, newest: str) -> Table:
    """One row per worker; weights that are not the newest are marked."""
    numbers = ["seen", "holds", "load", "tok/s", "done", "bad"]
    grid = table("worker", "engine", "state", "weights", *numbers, right=numbers)
    for row in rows:
        silent_ms, weights = int(row["silent_ms"]), row.get("weights", "")
        is_silent = silent_ms >= lease_ms
        grid.add_row(
            plain(row["id"]),
            plain(row.get("engine", "")),
            state(worker_state(row, not is_silent)),
            Text(plain(weights) or "-", style="" if weights == newest else "yellow"),
            Text(age(silent_ms), style="red" if is_silent else ""),
            _holds(row),
            row.get("requests") or "-",
            count(float(row.get("tokens_per_s", 0))),
            row.get("done", "0"),
            _bad(row),
        )
    return grid


def _holds(row: dict[str, str]) -> str:
    """Groups in work, of how many there may be."""
    most = row.get("concurrency", "0")
    return row["holds"] if most == "0" else f"{row['holds']}/{most}"


def judges_table(rows: list[dict[str, str]]) -> Table:
    """How long the newest answers of judges took, and how many of all were failures."""
    numbers = ["judged", "failed", "median", "99 of 100 within"]
    grid = table("worker", *numbers, right=numbers)
    for row in rows:
        failures = row.get("judge_failures", "0")
        times = [age(int(row.get(name, "0"))) for name in ("judge_p50_ms", "judge_p99_ms")]
        failed = Text(failures, style="dim" if failures == "0" else "red")
        grid.add_row(plain(row["id"]), row["judged"], failed, *times)
    return grid


def _bad(row: dict[str, str]) -> Text:
    """Groups that failed in its hands, and those that a trainer could not use."""
    bad = int(row.get("failed", "0")) + int(row.get("quarantined", "0"))
    return Text(str(bad), style="red" if bad else "dim")


def _as_json(row: dict[str, str], lease_ms: int) -> dict[str, object]:
    numbers = {name: int(row[name]) for name in _NUMBERS if row.get(name)}
    rate = float(row.get("tokens_per_s", 0))
    judged, judging_ms = (int(row.get(name, "0")) for name in ("judged", "judging_ms"))
    private = {"nonce", "claim", "claimed"}
    return (
        {name: value for name, value in row.items() if name not in private}
        | numbers
        | {
            "tokens_per_s": rate,
            "judge_s": judging_ms / 1000 / judged if judged else None,
            "alive": int(row["silent_ms"]) < lease_ms,
        }
    )
