"""Print results as a table or JSON, and update the figures of benchmarks/README.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure

_BEGIN = "<!-- figures: written by `make bench` -->"
_END = "<!-- end of figures -->"
_VERDICTS = {None: "", True: "met", False: "MISSED"}


def print_table(figures: Sequence[Figure]) -> None:
    """All figures, section by section."""
    table = Table("figure", "value", "unit", "target", "", box=None, pad_edge=False)
    for column in (1, 3):
        table.columns[column].justify = "right"
    for section, rows in _sections(figures):
        table.add_row(f"[bold]{section}")
        for figure in rows:
            style = "red" if figure.met is False else None
            table.add_row(*_cells(figure), style=style)
    Console(highlight=False).print(table)


def write_json(figures: Sequence[Figure], machine: dict[str, str], path: Path) -> None:
    """Machine and figures, as one document."""
    rows = [asdict(figure) | {"met": figure.met} for figure in figures]
    document = {"machine": machine, "figures": rows}
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_json(path: Path) -> list[Figure]:
    """Return the figures of an earlier run; none without a file."""
    if not path.is_file():
        return []
    rows = orjson.loads(path.read_bytes())["figures"]
    return [Figure(**{name: value for name, value in row.items() if name != "met"}) for row in rows]


def merge(earlier: Sequence[Figure], newer: Sequence[Figure]) -> list[Figure]:
    """Sections that were measured again in the place of the old ones, new sections behind them."""
    sections = {
        section: list(rows) for section, rows in groupby(earlier, lambda figure: figure.section)
    }
    sections |= {
        section: list(rows) for section, rows in groupby(newer, lambda figure: figure.section)
    }
    return [figure for rows in sections.values() for figure in rows]


def write_readme(figures: Sequence[Figure], machine: dict[str, str], path: Path) -> None:
    """Replace what stands between the markers."""
    text = path.read_text(encoding="utf-8")
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    pictures = sorted(picture.stem for picture in (path.parent / "results").glob("*.png"))
    told = _markdown(figures, machine, pictures)
    path.write_text(f"{head}{_BEGIN}\n\n{told}\n{_END}{tail}", encoding="utf-8")


def _markdown(figures: Sequence[Figure], machine: dict[str, str], pictures: Sequence[str]) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in machine.items()) + ".", ""]
    for name in pictures:
        lines += [f"![{name}](results/{name}.png)", ""]
    for section, rows in _sections(figures):
        lines += [f"| {section} | value | unit | target | |", "|---|---:|---|---:|---|"]
        lines += ["| " + " | ".join(_cells(figure)) + " |" for figure in rows]
        lines.append("")
    return "\n".join(lines)


def _sections(figures: Sequence[Figure]) -> list[tuple[str, list[Figure]]]:
    told = [figure for figure in figures if not figure.detail]
    return [(section, list(rows)) for section, rows in groupby(told, lambda figure: figure.section)]


def _cells(figure: Figure) -> tuple[str, str, str, str, str]:
    sign = "≥" if figure.better == "more" else "≤"
    target = "" if figure.target is None else f"{sign} {figure.target:g}"
    return figure.name, _number(figure.value), figure.unit, target, _VERDICTS[figure.met]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
