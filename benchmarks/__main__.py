"""`python -m benchmarks`: measure, print, and update benchmarks/README.md."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figure import Figure
from benchmarks.machine import machine_facts
from benchmarks.report import merge, print_table, read_json, write_json, write_readme
from benchmarks.suite import FULL, QUICK, SUITE, run_suite

HERE = Path(__file__).parent
EPILOG = (
    "Examples: python -m benchmarks · python -m benchmarks --quick · python -m "
    "benchmarks put take --update"
)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"which ones: {', '.join(SUITE)}; default: all")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="two or three minutes: smaller, rougher figures")
    ] = False,
    results: Annotated[Path | None, typer.Option(help="folder for JSON and plots")] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="measure nothing: write plots and README's table again")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="put these into README's figures")
    ] = False,
) -> None:
    """Compare the buffer with raw Redis, on servers of its own."""
    if tables:
        _draw_again()
        return
    chosen = names or list(SUITE)
    if unknown := set(chosen) - set(SUITE):
        raise typer.BadParameter(f"no benchmark {sorted(unknown)}; there are {list(SUITE)}")
    figures: list[Figure] = []
    began = time.monotonic()
    for figure in run_suite(chosen, QUICK if quick else FULL):
        if not figures or figures[-1].section != figure.section:
            typer.echo(f"{time.monotonic() - began:5.0f} s  {figure.section}", err=True)
        figures.append(figure)
    print_table(figures)
    is_whole = not quick and not names
    if update:
        figures = merge(read_json(HERE / "results" / "figures.json")[0], figures)
    if folder := results or (HERE / "results" if is_whole or update else None):
        _write(figures, machine_facts(), folder)
    if is_whole or update:
        write_readme(figures, machine_facts(), HERE / "README.md")


def _write(figures: list[Figure], facts: dict[str, str], folder: Path) -> None:
    from benchmarks.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    write_json(figures, facts, folder / "figures.json")
    draw(figures, folder)


def _draw_again() -> None:
    """Write plots and table from figures.json, without measuring."""
    figures, facts = read_json(HERE / "results" / "figures.json")
    _write(figures, facts, HERE / "results")
    write_readme(figures, facts, HERE / "README.md")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(epilog=EPILOG)(main)
    app()
