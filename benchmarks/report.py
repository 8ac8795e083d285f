"""Print results as a table or JSON, and fill the table of benchmarks/README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.asked import machine, measure, table
from benchmarks.figure import Figure

_MARK = "figures: written by `make bench`"
_VERDICTS = {None: "", True: "met", False: "MISSED"}


def print_table(figures: Sequence[Figure]) -> None:
    """All figures, section by section."""
    shown = Table("figure", "value", "unit", "asked", "", box=None, pad_edge=False)
    for column in (1, 3):
        shown.columns[column].justify = "right"
    for section, rows in groupby(figures, lambda figure: figure.section):
        shown.add_row(f"[bold]{section}")
        for figure in rows:
            if not figure.detail:
                style = "red" if figure.met is False else None
                shown.add_row(*_cells(figure), style=style)
    Console(highlight=False).print(shown)


def write_json(figures: Sequence[Figure], facts: Mapping[str, str], path: Path) -> None:
    """Machine and figures, as one document with a line for each figure."""
    lines = [orjson.dumps(_short(figure)).decode() for figure in figures]
    head = f'{{"machine": {orjson.dumps(facts).decode()},\n"figures": [\n'
    path.write_text(head + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def read_json(path: Path) -> tuple[list[Figure], dict[str, str]]:
    """Return figures and machine of an earlier run; none without a file."""
    if not path.is_file():
        return [], {}
    document = orjson.loads(path.read_bytes())
    return [Figure(**row) for row in document["figures"]], document["machine"]


def _short(figure: Figure) -> dict[str, Any]:
    """Return what differs from the defaults of a figure; four digits are more than is measured."""
    row = asdict(figure) | {"value": float(f"{figure.value:.4g}")}
    defaults = {"target": None, "better": "more", "detail": False}
    return {name: value for name, value in row.items() if defaults.get(name, ...) != value}


def merge(earlier: Sequence[Figure], newer: Sequence[Figure]) -> list[Figure]:
    """Sections that were measured again in the place of the old ones, new sections behind them."""
    sections = {
        section: list(rows) for section, rows in groupby(earlier, lambda figure: figure.section)
    }
    sections |= {
        section: list(rows) for section, rows in groupby(newer, lambda figure: figure.section)
    }
    return [figure for rows in sections.values() for figure in rows]


def write_readme(figures: Sequence[Figure], facts: Mapping[str, str], path: Path) -> None:
    """Replace the table of all benchmarks."""
    fill_in(path, _MARK, [*table(figures), "", machine(facts)])


def fill_in(path: Path, mark: str, lines: Sequence[str]) -> None:
    """Replace what stands in a page between the comment `mark` and the end of its figures."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark.partition(':')[0]} -->"
    head, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, _, tail = rest.partition(end)
    filled = "\n".join(lines)
    path.write_text(f"{head}{begin}\n\n{filled}\n\n{end}{tail}", encoding="utf-8")


def _cells(figure: Figure) -> tuple[str, str, str, str, str]:
    sign = "≥" if figure.better == "more" else "≤"
    target = "" if figure.target is None else f"{sign} {figure.target:g}"
    return figure.name, measure(figure), figure.unit, target, _VERDICTS[figure.met]
