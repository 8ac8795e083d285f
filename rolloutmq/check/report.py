"""Print the findings of the check, grouped by section, on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from rolloutmq.check.finding import Finding
from rolloutmq.output import plural, table

MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "error": ("BAD", "bold red")}

PROMPT_LINES = 10
PROMPT_CHARACTERS = 800  # of a prompt in the report


def show(screen: Console, findings: Sequence[Finding]) -> None:
    """Print a line for each finding, the prompts, and the verdict."""
    grid = table("", "", "")
    for section, group in groupby(_lines(findings), key=lambda found: found.section):
        for number, found in enumerate(group):
            mark, style = MARKS[found.level]
            fix = Text(f"\n{found.fix}", style="dim") if found.fix else Text()
            grid.add_row("" if number else section, Text(mark, style=style), Text(found.what) + fix)
    grid.show_header = False
    screen.print(grid)
    for found in findings:
        if found.text:
            screen.print(Panel.fit(Text(_cut(found.text)), title=found.what, title_align="left"))
    screen.print(_verdict(findings))


def _lines(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that are lines; the importable functions share one."""
    lines = [each for each in findings if not each.text]
    fine = [each for each in lines if (each.section, each.level) == ("functions", "ok")]
    if not fine:
        return lines
    joined = replace(fine[0], what=", ".join(each.what for each in fine))
    return [joined if each is fine[0] else each for each in lines if each not in fine[1:]]


def _cut(text: str) -> str:
    lines = text[:PROMPT_CHARACTERS].splitlines()[:PROMPT_LINES]
    shown = "\n".join(lines)
    return shown if len(shown) == len(text) else f"{shown}…"


def _verdict(findings: Sequence[Finding]) -> Text:
    errors = sum(found.level == "error" for found in findings)
    warnings = sum(found.level == "warning" for found in findings)
    if errors:
        return Text(f"{plural(errors, 'error')}, {plural(warnings, 'warning')}", style="bold red")
    if warnings:
        return Text(f"no errors, {plural(warnings, 'warning')}", style="yellow")
    return Text("nothing is wrong", style="green")
