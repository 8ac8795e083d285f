"""Draw a run in 80 columns, once or again and again, for `status` and `rolloutmq run`.

Numbers that must add up share a line, which is red if they do not. Yellow is waiting or near a
limit; red needs an operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from buffer.control.control import RoleHolder
from buffer.control.events import Event
from buffer.control.worker_record import NUMBERS, WorkerRecord
from buffer.errors import StoreUnavailable
from buffer.ledger.account import TaskAccount
from buffer.run.run import Run
from rolloutmq.output import (
    age,
    bar,
    count,
    facts,
    known,
    money,
    plural,
    sparkline,
    state,
    table,
    worker_state,
)
from rolloutmq.views.explain.shares import shares_of
from rolloutmq.views.history import History
from rolloutmq.views.number_rows import Note, notes_of
from rolloutmq.views.run_view import RunView, TaskView, read_run_view

LINE_S = 5.0  # between two lines elsewhere
MOST_EVENTS = 5
MOST_WORKERS = 8
_WIDTH = 36
_COLUMNS = {
    "waiting": "wait", "running": "run", "completed": "ready", "aborted": "abort",
    "expired": "exp", "taken": "taken", "archived": "done",
    "filtered": "filt", "dropped": "drop", "skipped": "skip", "dead": "dead",
}  # fmt: skip
_LEVELS = {"note": "", "warning": "yellow", "error": "red"}
_LOADING = {"trainer": "loads the model", "producer": "opens the data sets"}
_EVENT_STYLES = {
    **dict.fromkeys(("completed", "committed"), "green"),
    **dict.fromkeys(("aborted", "expired", "released"), "yellow"),
    **dict.fromkeys(("control", "weights"), "cyan"),
    **dict.fromkeys(
        ("reaped", "reasserted", "restored", "dissolved", "ledger_reset", "worker_lost"), "red"
    ),
    "worker_fenced": "red",
}


@dataclass(slots=True)
class LiveNotes:
    """What `rolloutmq run` adds to the live screen.

    `lines`: launcher reports. `started_s`: seconds since the start, by process. `trouble`: why the
    last frame is old, in red.
    """

    lines: list[str] = field(default_factory=list)
    started_s: dict[str, float] = field(default_factory=dict)
    trouble: str = ""


def status_screen(view: RunView) -> RenderableType:
    """Return the state of a run: facts, groups by stage, and each training task."""
    return Group(_title(view), _facts(view), "", *_groups(view))


def live_screen(view: RunView, history: History, notes: LiveNotes) -> RenderableType:
    """Return the same with curves, waits, workers and events."""
    parts: list[RenderableType] = [_title(view)]
    parts += [Text(line, style="cyan") for line in notes.lines]
    parts += [Text(notes.trouble, style="bold red")] if notes.trouble else []
    parts += ["", *_curves(history), "", *_groups(view)]
    parts += [_fit(Text(trouble, style="red")) for trouble in view.troubles]
    waits = (" · ".join(history.waits) or "nobody", "yellow")  # which process waits for which now
    parts += ["", _fit(Text.assemble((f"{'waits':<13}", "dim"), waits)), _facts(view)]
    parts += [_fit(Text(line, style="yellow")) for line in starting_lines(view, notes.started_s)]
    parts += [*_workers(view), ""]
    parts += [_fit(event_text(event)) for event in view.events[-MOST_EVENTS:]]
    return Group(*parts)


def one_line(view: RunView, history: History, notes: LiveNotes) -> str:
    """Return one line, for logs and pipes."""
    rewards = history.metric("rewards/mean")
    wanted = sum(task.batch_share for task in view.training)
    ready = sum(task.ready for task in view.training)
    barred = sum(worker.is_barred for worker in view.live_workers)
    words = [
        time.strftime("%H:%M:%S"),
        f"step {view.taken} of {view.last_step}",
        f"weights {view.weights.version}",
        f"reward {rewards[-1]:.3f}" if rewards else "reward -",
        f"waiting {view.stages['waiting']}",
        f"running {view.stages['running']}{_judged(view)}",
        f"ready {ready} of {wanted}" if wanted else f"ready {ready}",
        f"{count(view.tokens_per_s)} tok/s",
        plural(len(view.live_workers), "worker"),
        *([f"{barred} of them barred: see rolloutmq doctor"] if barred else []),
        *starting_lines(view, notes.started_s),
    ]
    words += [view.mode] if view.mode != "run" else []
    words += history.waits
    words += ["WAITS FOR YOU"] if view.stuck_on else []
    words += [trouble[:160] for trouble in view.troubles]
    words += ["THE ACCOUNT DOES NOT ADD UP"] if view.faults else []
    return " · ".join([*words, *notes.lines[:1]])


def _fit(text: Text) -> Text:
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text


# -- the run -------------------------------------------------------------------


def _title(view: RunView) -> Text:
    run = (f"run {view.run} · step {view.taken} of {view.last_step}", "bold")
    created = age(view.now_ms - view.created_ms)
    rest = f" · weights {view.weights} · created {created} ago\n"
    return Text.assemble(run, rest, _mode(view))


def _mode(view: RunView) -> Text:
    """Return the mode, who set it, since when, and how many workers confirmed it."""
    if view.phase == "finished":
        return Text.assemble(
            state(view.phase), f" the last step was done {age(view.paused_ms)} ago"
        )
    if view.phase == "stopped":
        return Text.assemble(state(view.phase), " no process of the run is alive")
    if view.stuck_on:
        return Text(f"it waits until you resume task {', '.join(view.stuck_on)}", style="bold red")
    if view.paused_by is None:
        return Text.assemble(state(view.mode), f" for {age(view.paused_ms)}")
    confirmed = f"{len(view.acknowledged)} of {len(view.live_workers)} confirmed"
    text = Text.assemble(
        state(view.mode),
        f" paused by the {view.paused_by} {age(view.paused_ms)} ago, {confirmed}",
        "; that trainer is gone: run `rolloutmq resume`" if view.is_orphaned else "",
    )
    text.stylize("yellow")
    return text


def _facts(view: RunView) -> Table:
    notes = Text(" · ").join(_said(note) for note in notes_of(view))
    refuses = "yellow" if view.memory.refuses_fresh else ""
    return facts(
        [
            ("steps", f"{view.taken} taken · {view.committed} committed · {view.freed} freed"),
            ("trainer", _role(view.trainer)),
            ("producer", _role(view.producer)),
            ("workers", _workers_text(view)),
            ("memory", Text(str(view.memory), style=refuses)),
            *([("cost", cost)] if (cost := _cost(view)) else []),
            *([("notes", notes)] if notes else []),
        ]
    )


def _cost(view: RunView) -> str:
    """Return what the run costs; "" without prices."""
    said = {"total": "so far", "step": "a step", "next_100_steps": "the next 100 steps"}
    found = {words: view.reported(f"cost/{name}") for name, words in said.items()}
    return " · ".join(
        f"{money(number)} {view.currency} {words}" for words, number in found.items() if number
    )


def _role(role: RoleHolder) -> Text:
    if role.silent_ms is None:
        return Text(role.word, style="dim")
    style = "red" if role.word == "silent" else ""
    return Text(f"{role.word}, last seen {age(role.silent_ms)} ago", style=style)


def _workers_text(view: RunView) -> Text:
    live = len(view.live_workers)
    counts = {"alive": live, "silent": len(view.silent_workers), "gone": len(view.ended_workers)}
    totals = {
        row.total: sum(getattr(worker, name) or 0 for worker in view.live_workers)
        for name, row in NUMBERS.items()
        if row.total
    }
    parts = [
        ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "0 alive",
        *(f"{count(number)} {words}" for words, number in totals.items()),
        f"{plural(view.leases, 'group')} running{_judged(view)}",
    ]
    return Text(" · ".join(parts), style="" if live or view.mode == "finish" else "yellow")


def _judged(view: RunView) -> str:
    """Return how many running groups only wait for their judge; "" for zero."""
    if not view.judging:
        return ""
    return f", of which {count(view.judging)} {'is' if view.judging == 1 else 'are'} being judged"


# -- groups and tasks ------------------------------------------------------------


def _groups(view: RunView) -> Iterator[RenderableType]:
    yield groups_table([task.account for task in view.tasks])
    if view.faults:
        faults = "; ".join(view.faults)
        text = f"THE ACCOUNT DOES NOT ADD UP: {faults}  (rolloutmq fsck)"
        yield Text(text, style="bold red")
    else:
        yield Text("the account adds up: enqueued = sum of all stages", style="green")
    for task in view.training:
        yield from _task(task)


def groups_table(accounts: Sequence[TaskAccount]) -> Table:
    """Return the groups by stage, one row per task, with a sum that must match the account."""
    grid = table("groups", *_COLUMNS.values(), "sum", right=[*_COLUMNS.values(), "sum"])
    grid.padding = (0, 1, 0, 0)
    put, imported = (sum(getattr(each, how) for each in accounts) for how in ("put", "imported"))
    if put or imported:
        grid.caption = f"of these, {put} were put and {imported} imported"
        grid.caption_justify = "left"
    for account in accounts:
        stages = account.stages
        total = sum(stages.values())
        wrong = total != account.total
        grid.add_row(
            account.task[:12],
            *(Text(str(stages[stage]), style="" if stages[stage] else "dim") for stage in _COLUMNS),
            Text(
                f"{total}!={account.total}" if wrong else str(total),
                style="bold red" if wrong else "bold",
            ),
        )
    return grid


def _task(task: TaskView) -> Iterator[Text]:
    """Yield how far a task is ahead of the trainer, its ready groups and their age, and losses."""
    limit = task.in_flight_limit
    has_target = bool(task.account.target)
    reward = "none yet" if task.mean_reward is None else f"{task.mean_reward:.3f}"
    yield Text.assemble(
        (f"{task.account.task[:12]:<13}", "bold"),
        ("ahead ", "dim"), (bar(task.in_flight, limit, 16), "cyan"),
        (f" {task.in_flight} of {limit if has_target else '(no target yet)'}",
         "yellow" if has_target and task.in_flight >= limit else ""),
        (" · ready ", "dim"), f"{task.ready} of {task.batch_share or '?'}",
    )  # fmt: skip
    groups = task.number("produced_groups")
    yield _fit(Text.assemble(
        ("produced     ", "dim"), f"{count(task.number('produced_tokens'))} tokens",
        f" · {task.number('produced_ms') / 1000 / groups:.1f} s a group" if groups else "",
        (" · mean reward ", "dim"), reward,
        (f" without {plural(task.account.dead, 'group')} that failed" if task.account.dead else "",
         "yellow"),
    ))  # fmt: skip
    if shares := list(shares_of(task)):
        parts = [(f"{each.name} {each.share:.0%}   ", _LEVELS[each.level]) for each in shares]
        yield Text.assemble(("shares       ", "dim"), *parts)
    if sampled := sum(task.tokens.values()):
        rows = sorted(task.tokens.items(), key=lambda row: -row[1])
        said = " · ".join(f"{n / sampled:.0%} {name}" for name, n in rows if n / sampled >= 0.005)
        yield _fit(Text.assemble(("tokens       ", "dim"), said.replace("_", " ")))
    # the ready groups by their staleness at the next train step
    ready = [f"{age}: {groups}   " for age, groups in task.staleness.items() if groups]
    limit_text = (f"limit {task.stale_threshold - 1}", "dim")
    yield Text.assemble(("staleness    ", "dim"), *ready, limit_text)
    if notes := [_said(note) for note in notes_of(task)]:
        yield Text.assemble(("groups       ", "dim"), Text(" · ").join(notes))


def _said(note: Note) -> Text:
    return Text(note.text, style=_LEVELS[note.level] or "dim")


# -- only live -------------------------------------------------------------------


def _curves(history: History) -> Iterator[Text]:
    rewards = history.metric("rewards/mean")
    if rewards:
        now = f"{rewards[-1]:.3f} now · {rewards[0]:.3f} first · {max(rewards):.3f} best"
        yield _curve("reward", rewards, 24, now)
    rates = list(history.token_rates)
    yield _curve("tokens/s", rates, _WIDTH, f"{count(rates[-1])} now" if rates else "")
    step_s = history.metric("time/step_s")
    stale = history.metric("staleness/mean")
    if step_s or stale:
        parts = [f"{step_s[-1]:.1f} s"] if step_s else []
        parts += [f"mean staleness {stale[-1]:.2f}"] if stale else []
        yield Text.assemble((f"{'last step':<13}", "dim"), " · ".join(parts))


def _curve(name: str, values: list[float], width: int, now: str) -> Text:
    line = sparkline(values, width)
    return _fit(Text.assemble((f"{name:<13}", "dim"), (line, "cyan"), f"  {now}"))


def _workers(view: RunView) -> Iterator[RenderableType]:
    if not view.workers:
        yield Text("no workers", style="dim" if view.mode == "finish" else "yellow")
        return
    yield workers_table(view.workers[:MOST_WORKERS], view.lease_ms, str(view.weights))
    if len(view.workers) > MOST_WORKERS:
        more = len(view.workers) - MOST_WORKERS
        yield Text(f"and {more} more: rolloutmq workers", style="dim")


def workers_table(rows: Sequence[WorkerRecord], lease_ms: int, newest: str) -> Table:
    """Return a row per worker; its weights are yellow unless they are the `newest`."""
    reported = {name: row.heading for name, row in NUMBERS.items() if row.table == "workers"}
    numbers = ["seen", "holds", *reported.values(), "bad"]
    grid = table("worker", "state", "weights", *numbers, right=numbers)
    for row in rows:
        is_live = row.is_live(lease_ms)
        seen = age(row.silent_ms) if row.seen_ms else "-"
        faults = row.failed + row.quarantined
        grid.add_row(
            row.id,
            state(worker_state(row, is_live)),
            Text(row.weights or "-", style="" if row.weights == newest else "yellow"),
            Text(seen, style="" if is_live or row.has_ended else "red"),
            f"{row.holds}/{row.concurrency}" if row.concurrency else str(row.holds),
            *(known(getattr(row, name), ",.0f") for name in reported),
            Text(str(faults), style="red" if faults else "dim"),
        )
    return grid


def event_text(event: Event) -> Text:
    """Return `16:43:05.123 completed     gid math-0000000042  version 3`."""
    ms, name, fields = event
    clock = time.strftime("%H:%M:%S", time.localtime(ms / 1000)) + f".{ms % 1000:03d}"
    text = Text.assemble((f"{clock} ", "dim"), (f"{name:<14}", _EVENT_STYLES.get(name, "")))
    for key, value in fields.items():
        text.append(f" {key} ", style="dim")
        text.append(value)
    return text


def starting_lines(view: RunView, started_s: dict[str, float]) -> list[str]:
    """Return a line per process that has not joined, and for the first groups; see `LiveNotes`."""
    if view.mode == "finish":
        return []
    joined = {worker.id for worker in view.live_workers}
    joined |= {role.role for role in (view.trainer, view.producer) if role.is_alive}
    missing = {name: 1000 * s for name, s in started_s.items() if name not in joined}
    silent = {worker.id: worker.silent_ms for worker in (*view.ended_workers, *view.workers)}
    silent |= {role.role: role.silent_ms or 0 for role in (view.trainer, view.producer)}
    # one that has sent a heartbeat since its start has loaded, and hangs
    hung = {name: silent[name] for name in missing if 0 < silent.get(name, 0) < missing[name]}
    lines = [f"{name} has not answered for {age(ms)}" for name, ms in hung.items()]
    missing = {name: ms for name, ms in missing.items() if name not in hung}
    lines += [
        f"{name} {what}, {age(missing.pop(name))}"
        for name, what in _LOADING.items()
        if name in missing
    ]
    if missing:
        first = next(iter(missing))
        more = f" and {len(missing) - 1} more load their engines"
        who = first + (more if len(missing) > 1 else " loads its engine")
        lines.append(f"{who}, {age(max(missing.values()))}")
    if view.taken == 0 and started_s:
        lines += [_progress(task) for task in view.tasks if sum(task.account.stages.values())]
    return lines


def _progress(task: TaskView) -> str:
    """Return the progress of a task towards its evaluation or the first batch."""
    stages = task.account.stages
    left = stages["waiting"] + stages["running"]
    name = task.account.task
    if task.is_eval:
        done = sum(stages.values()) - left
        return f"{name} is evaluated: {count(done)} done, {count(left)} open"
    return f"{name}: {count(task.ready)} groups ready for step 1, {count(left)} waiting or running"


def watch(
    run: Run,
    history: History,
    notes: LiveNotes,
    screen: Console,
    is_over: Callable[[], bool],
    *,
    every_s: float | None = None,
) -> None:
    """Show `run` until `is_over()` returns True after a refresh.

    The last frame stays on the screen, with a red line while the server is unreachable.
    """
    if not screen.is_terminal:
        while True:
            view = _refresh(run, history, notes)
            line = notes.trouble if view is None else one_line(view, history, notes)
            screen.print(Text(line), soft_wrap=True)
            if is_over():
                return
            time.sleep(every_s or LINE_S)
    with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        last: RunView | None = None
        while True:
            last = _refresh(run, history, notes) or last
            if last is not None:
                live.update(live_screen(last, history, notes), refresh=True)
            if is_over():
                return
            time.sleep(every_s or 0.5)


def _refresh(run: Run, history: History, notes: LiveNotes) -> RunView | None:
    """Read the run; None, with the reason in `notes.trouble`, while the server is unreachable."""
    try:
        view = read_run_view(run, events=MOST_EVENTS)
    except StoreUnavailable as error:
        notes.trouble = error.message
        return None
    notes.trouble = ""
    history.observe(view)
    return view
