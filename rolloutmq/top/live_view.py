"""Draw the live view of a run on one screen of 80 columns.

Numbers that must add up are on one line, which is red when they do not. Limits are always shown.
Yellow is waiting or near a limit; red needs an operator.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from buffer.control.worker_record import WorkerRecord
from buffer.model.byte_size import format_size
from buffer.run import Run
from rolloutmq.commands.look.status import (
    account_text,
    judged_text,
    mode_text,
    role_text,
    staleness_text,
    workers_text,
)
from rolloutmq.commands.look.tail import event_text
from rolloutmq.console import plain
from rolloutmq.output import age, bar, count, plural, sparkline, state, table, worker_state
from rolloutmq.top.starting import starting_lines
from rolloutmq.views.history import PAUSED, PRODUCER, TRAINER, WORKERS, History
from rolloutmq.views.run_view import RunView, TaskView, read_run_view

EVENTS = 5
MOST_WORKERS = 8
MOST_TROUBLE = 120
"""Characters of an error in one line of output."""

_WIDTH = 36
_COLUMNS = {
    "waiting": "wait", "running": "run", "completed": "ready", "aborted": "abort",
    "expired": "exp", "taken": "taken", "archived": "done",
    "filtered": "filt", "dropped": "drop", "dead": "dead",
}  # fmt: skip


class LiveView:
    """Draws snapshots of one run.

    Below the title are `lines` (reports of the launcher), `prompt` (the keys, or a question)
    and, in red, `trouble` (the server is unreachable, say).
    """

    def __init__(self, *, run_dir: Path | None = None) -> None:
        self.run_dir = run_dir
        self.lines: list[str] = []
        self.started_s: dict[str, float] = {}
        """by process that the launcher has started: the seconds since then"""
        self.prompt = self.trouble = ""

    def history(self) -> History:
        """Return an empty history that reads the run's step log."""
        return History(self.run_dir)

    def snapshot(self, run: Run) -> RunView:
        """Take a snapshot with a few calls and no payloads. Raises StoreUnavailable."""
        return read_run_view(run, events=EVENTS)

    def render(self, snap: RunView, history: History) -> RenderableType:
        """Return the whole screen."""
        parts: list[RenderableType] = [self._title(snap)]
        parts += [Text(plain(line), style="cyan") for line in self.lines]
        parts += [Text(plain(self.prompt), style="bold")] if self.prompt else []
        parts += [Text(self.trouble, style="bold red")] if self.trouble else []
        parts += ["", *_curves(history), "", groups_table(snap)]
        for task in snap.training:
            parts += [_ahead(task), staleness_text(task)]
        parts += [_fit(Text(plain(trouble), style="red")) for trouble in snap.troubles]
        parts += [
            account_text(snap),
            "",
            *_waits(snap, history),
            "",
            _fit(workers_text(snap)),
            *(_fit(Text(line, style="yellow")) for line in starting_lines(snap, self.started_s)),
            *_workers(snap),
        ]
        parts += ["", *(_fit(event_text(event)) for event in snap.events)]
        return Group(*parts)

    def line(self, snap: RunView, history: History) -> str:
        """Return one line, for logs and pipes."""
        places = snap.places
        rewards = history.metric("rewards/mean")
        wanted = sum(task.batch_share for task in snap.training)
        words = [
            time.strftime("%H:%M:%S"),
            f"step {snap.taken} of {snap.last_step}",
            f"weights {snap.weights.version}",
            f"reward {rewards[-1]:.3f}" if rewards else "reward -",
            f"waiting {places['waiting']}",
            f"running {places['running']}{judged_text(snap)}",
            f"ready {sum(task.ready for task in snap.training)}"
            + (f" of {wanted}" if wanted else ""),
            f"{count(snap.tokens_per_s)} tok/s",
            plural(len(snap.live_workers), "worker"),
            *_barred(snap),
            *starting_lines(snap, self.started_s),
        ]
        words += [snap.mode] if snap.mode != "run" else []
        words += [wait for wait, part in history.waits.items() if part and wait != PAUSED]
        words += [plain(trouble)[:MOST_TROUBLE] for trouble in snap.troubles]
        words += ["THE ACCOUNT DOES NOT ADD UP"] if snap.faults else []
        return " · ".join([*words, *self.lines[:1]])

    def _title(self, snap: RunView) -> Text:
        up = age(snap.now_ms - int(snap.meta.get("created_ms", snap.now_ms)))
        text = Text(" · ", style="dim").join([
            Text(f"run {snap.run}", style="bold"),
            Text(f"step {snap.taken} of {snap.last_step}", style="bold"),
            Text(f"weights {snap.weights}"),
            Text(f"up {up}"),
        ])  # fmt: skip
        return _fit(Text("\n").join([text, mode_text(snap)]))


def _barred(snap: RunView) -> list[str]:
    barred = sum(worker.is_barred for worker in snap.live_workers)
    return [f"{barred} of them barred: see rolloutmq doctor"] if barred else []


def _fit(text: Text) -> Text:
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text


def _curves(history: History) -> list[Text]:
    rewards = history.metric("rewards/mean")
    rates = list(history.token_rates)
    lines = [_curve("tokens/s", rates, f"{count(rates[-1])} now" if rates else "")]
    if rewards:
        lines.insert(
            0,
            _curve(
                "reward",
                rewards,
                f"{rewards[-1]:.3f} now · {rewards[0]:.3f} first · {max(rewards):.3f} best",
            ),
        )
    step_s = history.metric("time/step_s")
    stale = history.metric("staleness/mean")
    if step_s or stale:
        parts = [f"{step_s[-1]:.1f} s"] if step_s else []
        parts += [f"mean staleness {stale[-1]:.2f}"] if stale else []
        lines.append(Text.assemble((f"{'last step':<13}", "dim"), " · ".join(parts)))
    return lines


def _curve(name: str, values: list[float], now: str) -> Text:
    width = _WIDTH if name == "tokens/s" else 24
    return _fit(
        Text.assemble((f"{name:<13}", "dim"), (sparkline(values, width), "cyan"), f"  {now}")
    )


def groups_table(snap: RunView) -> Table:
    """Return the groups by stage, one row per task, with a sum that must match the account."""
    grid = table("groups", *_COLUMNS.values(), "sum", right=[*_COLUMNS.values(), "sum"])
    grid.padding = (0, 1, 0, 0)
    for task in snap.tasks:
        places = task.account.stages
        cells = [
            Text(str(places[place]), style="" if places[place] else "dim") for place in _COLUMNS
        ]
        total = sum(places.values())
        wrong = total != task.account.total
        cells.append(
            Text(
                f"{total}!={task.account.total}" if wrong else str(total),
                style="bold red" if wrong else "bold",
            )
        )
        grid.add_row(plain(task.account.task)[:12], *cells)
    return grid


def _ahead(task: TaskView) -> Text:
    """Return how far a task is ahead of the trainer, how far it may be, and what is ready."""
    limit = task.in_flight_limit
    started = task.in_flight
    style = "yellow" if task.account.target and started >= limit else ""
    return Text.assemble(
        (f"{plain(task.account.task)[:12]:<13}", "bold"),
        ("ahead ", "dim"), (bar(started, limit, 16), "cyan"),
        (f" {started} of {limit if task.account.target else '(no target yet)'}", style),
        (" · ready ", "dim"), f"{task.ready} of {task.batch_share or '?'}",
    )  # fmt: skip


def _waits(snap: RunView, history: History) -> list[Text]:
    """Return which process waits for which, now and as a share of the observed time."""
    cells = []
    for wait in (TRAINER, WORKERS, PRODUCER, PAUSED):
        now = history.waits.get(wait, 0.0)
        cells.append(
            Text(
                f"{'>' if now else ' '} {wait:<25} {history.share(wait):4.0%}",
                style="yellow" if now else "dim",
            )
        )
    roles = [
        Text.assemble(("trainer   ", "dim"), role_text(snap.trainer)),
        Text.assemble(("producer  ", "dim"), role_text(snap.producer)),
    ]
    rows = [
        *roles,
        Text.assemble(("dead letters ", "dim"), (str(snap.dead), "yellow" if snap.dead else "")),
        Text.assemble(("memory    ", "dim"), _memory(snap)),
    ]
    return [_fit(Text.assemble(cell, "   ", row)) for cell, row in zip(cells, rows, strict=True)]


def _memory(snap: RunView) -> Text:
    memory = snap.memory
    of = f" of {format_size(memory.high)}" if memory.high else ""
    wait = ", no new prompts" if memory.refuses_fresh else ""
    return Text(f"{format_size(memory.held)}{of}{wait}", style="yellow" if wait else "")


def _workers(snap: RunView) -> list[Text]:
    live = {worker.id for worker in snap.live_workers}
    if not snap.workers:
        return [Text("no workers", style="dim" if snap.mode == "finish" else "yellow")]
    lines = [
        _worker(worker, worker.id in live, str(snap.weights))
        for worker in snap.workers[:MOST_WORKERS]
    ]
    if len(snap.workers) > MOST_WORKERS:
        lines.append(
            Text(f"and {len(snap.workers) - MOST_WORKERS} more: rolloutmq workers", style="dim")
        )
    return lines


def _worker(worker: WorkerRecord, is_live: bool, newest: str) -> Text:
    weights = worker.weights or "-"
    rate = f"{count(worker.tokens_per_s):>7} tok/s"
    seen = f"seen {age(worker.silent_ms)} ago"
    return _fit(
        Text.assemble(
            f"{plain(worker.id)[:16]:<16} ",
            state(worker_state(worker, is_live)),
            " ",
            (f"{plain(weights):<12}", "" if weights == newest else "yellow"),
            (f" {rate if is_live else seen:>13}", "" if is_live else "red"),
            f"  holds {worker.holds:>3}  done {worker.done:>5}",
        )
    )
