"""Print tables for people, and JSON for programs.

Text of a model is never parsed as markup, and its control characters are made visible.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import orjson
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from buffer.control.worker_record import WorkerRecord, WorkerState
from buffer.readable import visible

BARS = "▁▂▃▄▅▆▇█"

_GOOD = ("run", "running", "finished", WorkerState.IDLE, WorkerState.WORKING, "completed")
_STATE_STYLES: dict[str, str] = {
    **dict.fromkeys(_GOOD, "green"),
    **dict.fromkeys((WorkerState.STARTING, "loading"), "cyan"),
    **dict.fromkeys(("stopped", WorkerState.PAUSED, WorkerState.DRAINING), "yellow"),
    **dict.fromkeys(("died", "silent", "barred", "dead", "failed"), "red"),
}
_VERSION_STYLES = (
    "cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta",
)  # fmt: skip


def emit(document: Any) -> None:
    option = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    typer.echo(visible(orjson.dumps(document, option=option).decode()))


def emit_line(document: Any) -> None:
    """Print one JSON document on one line, for streams."""
    typer.echo(visible(orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS).decode()))


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table without lines; the columns in `right` hold numbers."""
    numbers = set(right)
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        grid.add_column(
            name,
            justify="right" if name in numbers else "left",
            no_wrap=name in numbers or name == "gid",  # a gid is copied, so it is never cut
        )
    return grid


def facts(rows: Sequence[tuple[str, str | Text]]) -> Table:
    """Return a table of names and values, one pair per line."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def state(word: str, *, width: int = 9) -> Text:
    """Return a state in brackets of a fixed width, in its colour: `[idle     ]`."""
    return Text(f"[{word[:width]:<{width}}]", style=_STATE_STYLES.get(word, ""))


def worker_state(worker: WorkerRecord, is_live: bool) -> str:
    if not is_live:
        return worker.state if worker.has_ended else "silent"
    return "barred" if worker.is_barred else worker.state


def version_style(version: int) -> str:
    """Return the colour of a policy version; consecutive versions differ."""
    return _VERSION_STYLES[version % len(_VERSION_STYLES)]


def age(ms: float) -> str:
    """Format milliseconds for people: 0.4 s, 12 s, 3 min 20 s, 2 h 10 min, 3 d 4 h."""
    seconds = max(ms, 0.0) / 1000
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit, small, small_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= size:
            rest = int(seconds % size // small)
            return f"{int(seconds // size)} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{seconds:.0f} s"


def count(number: float) -> str:
    """Format 1234567 as 1,234,567."""
    return f"{number:,.0f}"


def money(amount: float) -> str:
    """Format 1234.5 as 1,234.50, and 0.00123 as 0.0012."""
    return f"{amount:,.2f}" if amount >= 1 or not amount else f"{amount:.2g}"


def known(value: float | None, spec: str = "") -> str:
    return "-" if value is None else format(value, spec)


def plural(number: int, noun: str) -> str:
    """Format a number with its noun: 1 group, 2 groups."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return at most `width` bars, scaled from lowest to highest; more values are averaged."""
    if not values or width < 1:
        return ""
    cells = min(width, len(values))
    edges = [len(values) * i // cells for i in range(cells + 1)]
    points = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(points)
    high = max(points)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((point - low) * scale)] for point in points)


def bar(value: float, limit: float, width: int) -> str:
    filled = 0 if limit <= 0 else round(min(max(value / limit, 0.0), 1.0) * width)
    if value > 0 and limit > 0:
        filled = max(filled, 1)
    return "█" * filled + "░" * (width - filled)


class PlainConsole(Console):
    """Prints every text as `visible` returns it.

    Rollouts and worker names come from other machines: an escape sequence in one could rewrite an
    operator's screen or clipboard.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def console(*, stderr: bool = False) -> Console:
    """Open a console without guessed colours (rich itself respects NO_COLOR).

    In a file or pipe, lines are as wide as their content, unless COLUMNS is set.
    """
    opened = PlainConsole(highlight=False, emoji=False, markup=False, stderr=stderr)
    if os.environ.get("COLUMNS", "0").strip("0") == "":
        size = shutil.get_terminal_size()
        opened.width = size.columns if opened.is_terminal else 10_000
    return opened


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str, int], object]]:
    """Show on stderr what is done, and how many."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}: {task.completed:,.0f}"), TimeElapsedColumn())
    disable = quiet or not screen.is_terminal
    with Progress(*columns, console=screen, transient=True, disable=disable) as bar:
        job = bar.add_task("copying", total=None)
        yield lambda what, done: bar.update(job, description=what, completed=done)
