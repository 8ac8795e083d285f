"""Draw the figures: throughput of every way, cost by size of the pool, simulated fleets."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure as Canvas

from benchmarks.figure import Figure
from benchmarks.fleet_plots import draw_fleets

_SIZE = re.compile(r"^(.*), ([\d,]+) groups$")


def draw(figures: Sequence[Figure], folder: Path) -> None:
    """Draw throughput, scaling, idle, staleness, scale and pause .png, where there are figures."""
    if rates := [f for f in figures if f.unit == "groups/s"]:
        _throughput(rates).savefig(folder / "throughput.png", dpi=110)
    if costs := [f for f in figures if f.unit == "us" and _SIZE.match(f.name)]:
        _scaling(costs).savefig(folder / "scaling.png", dpi=110)
    draw_fleets(figures, folder)


def _throughput(figures: Sequence[Figure]) -> Canvas:
    sections = list(dict.fromkeys(figure.section for figure in figures))
    canvas = Canvas(figsize=(11, 3.2 * ((len(sections) + 1) // 2)), layout="constrained")
    for place, section in enumerate(sections, 1):
        rows = [figure for figure in figures if figure.section == section][::-1]
        axes = canvas.add_subplot((len(sections) + 1) // 2, 2, place)
        colours = ["tab:orange" if row.name.startswith("ours") else "tab:gray" for row in rows]
        axes.barh([row.name for row in rows], [row.value for row in rows], color=colours)
        axes.set_title(section)
        axes.set_xlabel("groups of 165,888 bytes per second")
    return canvas


def _scaling(figures: Sequence[Figure]) -> Canvas:
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for figure in figures:
        if match := _SIZE.match(figure.name):
            name = f"{match[1]} (scan-based)" if figure.section == "scan-based" else match[1]
            lines[name].append((int(match[2].replace(",", "")), figure.value))
    canvas = Canvas(figsize=(8, 5), layout="constrained")
    axes = canvas.add_subplot()
    for name, points in lines.items():
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            linestyle="-" if len(points) > 1 else "",
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="groups in the pool", ylabel="microseconds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return canvas
