"""`rolloutmq status`: show the state of one run, or list the runs of a server."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from buffer.control.role_holder import RoleHolder
from buffer.run import Run
from rolloutmq.console import console, plain
from rolloutmq.options import (
    Address,
    AsJson,
    RedisUrl,
    RunDir,
    RunName,
    choose_run,
    open_server,
)
from rolloutmq.output import age, bar, count, emit, facts, plural, state, table
from rolloutmq.views.run_json import describe
from rolloutmq.views.run_view import RunView, TaskView, read_run_view

EPILOG = "Example: rolloutmq status --json | python -m json.tool"

_PLACES = ("waiting", "running", "completed", "aborted", "expired", "taken")
_ENDS = ("archived", "filtered", "dropped", "dead")


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(status)


def status(
    redis_url: RedisUrl = None, run_dir: RunDir = None, run: RunName = None, as_json: AsJson = False
) -> None:
    """Show the state of a run: groups, weights, workers, staleness.

    Also shows whether it is paused, by whom and since when, and whether every group is accounted
    for. With several runs on the server and no --run, lists them.
    """
    with open_server(redis_url, run_dir) as (store, address):
        names = Run.names(store, damaged=True) if run is None else [choose_run(store, run)]
        snapshots = [read_run_view(Run.open(store, name)) for name in names]
    if len(snapshots) == 1:
        emit(describe(snapshots[0])) if as_json else show(console(), snapshots[0])
    elif as_json:
        emit({"runs": [_brief(snap) for snap in snapshots]})
    else:
        _list_runs(address, snapshots)


def _brief(snap: RunView) -> dict[str, Any]:
    steps = {"taken": snap.taken, "committed": snap.committed, "freed": snap.freed}
    workers = len(snap.live_workers)
    return {
        "run": snap.run,
        "mode": snap.mode,
        "steps": steps,
        "workers": workers,
        "adds_up": not snap.faults,
    }


def show(screen: Console, snap: RunView) -> None:
    """Print the status of one run."""
    created = age(snap.now_ms - int(snap.meta.get("created_ms", 0)))
    dead = Text(f"{snap.dead}  (rolloutmq dead)", style="yellow") if snap.dead else "0"
    screen.print(facts([
        ("run", f"{snap.run}, created {created} ago"),
        ("mode", mode_text(snap)),
        ("weights", f"{snap.weights} in {snap.control.get('weights_path') or '(no path)'}"),
        ("train step", f"{snap.taken} taken · {snap.committed} committed · {snap.freed} freed"),
        ("trainer", role_text(snap.trainer)),
        ("producer", role_text(snap.producer)),
        *curriculum_facts(snap),
        ("workers", workers_text(snap)),
        ("memory", memory_text(snap)),
        ("dead letters", dead),
    ]))  # fmt: skip
    screen.print()
    screen.print(places_table(snap))
    screen.print(account_text(snap))
    for trouble in snap.troubles:
        screen.print(Text(plain(trouble), style="red"))
    for task in snap.training:
        screen.print()
        screen.print(task_text(task))
        screen.print(staleness_text(task))
        if losses := losses_text(task):
            screen.print(losses)


def curriculum_facts(snap: RunView) -> list[tuple[str, Text]]:
    """Return why the curriculum is not followed; nothing if it is."""
    reason = snap.control.get("curriculum_error", "")
    return (
        [("curriculum", Text(f"not followed: {plain(reason)}", style="yellow"))] if reason else []
    )


def mode_text(snap: RunView) -> Text:
    """Return the mode, who set it, since when, and how many workers confirmed it."""
    if snap.paused_by is None:
        return Text.assemble(state(snap.mode), f" for {age(snap.paused_ms)}")
    if snap.mode == "finish":
        return Text.assemble(state(snap.mode), f" the last step was done {age(snap.paused_ms)} ago")
    confirmed = len(snap.acknowledged)
    live = len(snap.live_workers)
    text = Text.assemble(
        state(snap.mode),
        f" paused by the {snap.paused_by} {age(snap.paused_ms)} ago, {confirmed} of "
        f"{live} confirmed",
        "; that trainer is gone: run `rolloutmq resume`" if snap.is_orphaned else "",
    )
    text.stylize("yellow")
    return text


def role_text(role: RoleHolder) -> Text:
    """Return the state of a role, and when it was last seen."""
    if role.silent_ms is None:
        return Text(role.word, style="dim")
    style = "red" if role.word == "silent" else ""
    return Text(f"{role.word}, last seen {age(role.silent_ms)} ago", style=style)


def workers_text(snap: RunView) -> Text:
    """Return how many workers are alive, their rate, and their groups."""
    live = len(snap.live_workers)
    known = len(snap.workers)
    silent = f", {known - live} silent" if known > live else ""
    rate = f"{count(snap.tokens_per_s)} tokens/s"
    running = f"{plural(snap.leases, 'group')} running{judged_text(snap)}"
    return Text(f"{live} alive{silent} · {rate} · {running}", style="" if live else "yellow")


def judged_text(snap: RunView) -> str:
    """Return how many running groups only wait for their judge; "" for none."""
    return (
        f", of which {count(snap.judging)} {'is' if snap.judging == 1 else 'are'} being judged"
        if snap.judging
        else ""
    )


def memory_text(snap: RunView) -> Text:
    """Return the payload bytes, and their limits."""
    memory = snap.memory
    return Text(str(memory), style="yellow" if memory.refuses_fresh else "")


def places_table(snap: RunView) -> Any:
    """Return the groups by stage, one column per task."""
    names = [task.account.task for task in snap.tasks]
    grid = table("groups", *names, right=names)
    for place in (*_PLACES, *_ENDS):
        values = [task.account.stages[place] for task in snap.tasks]
        label = f"{place} (ready)" if place == "completed" else place
        grid.add_row(label, *(count(v) for v in values), style="" if any(values) else "dim")
    sums = [sum(task.account.stages.values()) for task in snap.tasks]
    grid.add_row("sum", *(count(v) for v in sums), style="bold")
    grid.add_row("enqueued", *(count(task.account.enqueued) for task in snap.tasks))
    for how in ("put", "imported"):
        if any(values := [getattr(task.account, how) for task in snap.tasks]):
            grid.add_row(how, *map(count, values))
    return grid


def account_text(snap: RunView) -> Text:
    """Return whether every group is in exactly one place; red if not."""
    if snap.faults:
        return Text(
            "THE ACCOUNT DOES NOT ADD UP: " + "; ".join(snap.faults) + "  (rolloutmq fsck)",
            style="bold red",
        )
    return Text("the account adds up: enqueued = sum of all stages", style="green")


def task_text(task: TaskView) -> Text:
    """Return how far ahead of the trainer a task is, and how far it may be."""
    limit = count(task.in_flight_limit) if task.account.target else "no target yet"
    reward = "none yet" if task.mean_reward is None else f"{task.mean_reward:.3f}"
    near = "yellow" if task.account.target and task.in_flight >= task.in_flight_limit else ""
    return Text.assemble(
        (f"{task.account.task:<12} ", "bold"),
        ("ahead ", "dim"),
        (f"{count(task.in_flight)} of {limit} groups", near),
        (" · produced ", "dim"),
        f"{count(task.number('produced_tokens'))} tokens",
        *_seconds(task),
        (" · mean reward ", "dim"),
        reward,
        "" if task.unparsed is None else (f" · unparsed {task.unparsed:.0%}", "yellow"),
    )


def _seconds(task: TaskView) -> list[str | tuple[str, str]]:
    groups = task.number("produced_groups")
    return (
        [(" · ", "dim"), f"{task.number('produced_ms') / 1000 / groups:.1f} s a group"]
        if groups
        else []
    )


def losses_text(task: TaskView) -> Text | None:
    """Return what was restored after the server lost data; None if it never did."""
    reasserted = int(task.number("reasserted"))
    regenerated = int(task.number("regenerated"))
    if not reasserted + regenerated:
        return None
    restored = (
        f"{plural(reasserted, 'group')} reasserted from checkpoints, "
        f"{count(regenerated)} generated again"
    )
    return Text.assemble(("lost data    ", "dim"), (restored, "yellow"))


def staleness_text(task: TaskView) -> Text:
    """Return the ready groups by their staleness at the next train step."""
    most = max(task.staleness.values(), default=0)
    text = Text("staleness    ", style="dim")
    for label, groups in task.staleness.items():
        text.append(f"{label} ", style="dim")
        text.append(bar(groups, most, 8).rstrip("░") or "▏", style="cyan")
        text.append(f" {groups}   ")
    text.append(f"limit {task.stale_threshold - 1}", style="dim")
    if task.too_old:
        text.append(f" · {task.too_old} too old, about to expire", style="yellow")
    if ended := int(task.number("ended_early")):
        tokens = count(int(task.number("discarded_tokens")))
        text.append(f" · {ended} ended early, too old ({tokens} tokens)", style="dim")
    return text


def _list_runs(address: Address, snapshots: list[RunView]) -> None:
    screen = console()
    if not snapshots:
        screen.print(f"There is no run on {address}.")
        screen.print("rolloutmq run CONFIG starts one.")
        return
    grid = table("run", "mode", "step", "workers", "account", right=["step", "workers"])
    for snap in snapshots:
        verdict = Text("does not add up", style="red") if snap.faults else Text("adds up")
        grid.add_row(
            snap.run, state(snap.mode), str(snap.taken), str(len(snap.live_workers)), verdict
        )
    screen.print(grid)
    screen.print(Text("rolloutmq status --run NAME shows one of them", style="dim"))
