"""The figures of all queues: as ratios to ours, as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure as Canvas

from benchmarks.asked import machine, measure
from benchmarks.figure import Figure, Spent, ratio
from benchmarks.peers.peer import Peer
from benchmarks.report import fill_in

KINDS = ("put", "take")
ASKED = {("166 KB, 128 a call", "put", "TransferQueue"): 1.0}
_MARK = "peers: written by `make bench-peers`"


def figures_of(section: str, peers: Sequence[Peer], spent: Mapping[str, Spent]) -> Iterator[Figure]:
    """Yield time per group, and its ratio to ours on a server that keeps as much."""
    for peer in peers:
        ours = "ours, durable" if peer.durable else "ours"
        for kind in KINDS:
            name, taken = f"{peer.name}: {kind}", spent[kind]
            yield Figure(section, f"{name}: processor", 1e6 * median(taken.cpu[peer.name]), "us")
            yield Figure(section, f"{name}: clock", 1e6 * median(taken.wall[peer.name]), "us")
            if peer.name != ours:
                asked = ASKED.get((section, kind, peer.name))
                yield Figure(
                    section, f"{name}: / ours", ratio(taken.cpu, ours, peer.name), "x", asked
                )


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield a table for each size, in microseconds for a group."""
    for section, of_section in groupby(figures, lambda figure: figure.section):
        values = {figure.name: measure(figure) for figure in of_section}
        columns = [f"{kind}: {what}" for kind in KINDS for what in ("processor", "/ ours")]
        yield "| " + " | ".join([section, *columns]) + " |"
        yield "|---" + "|---:" * len(columns) + "|"
        for peer in dict.fromkeys(name.partition(":")[0] for name in values):
            cells = (values.get(f"{peer}: {column}", "") for column in columns)
            yield "| " + " | ".join([peer, *cells]) + " |"
        yield ""


def write_table(figures: Sequence[Figure], facts: Mapping[str, str], path: Path) -> None:
    """Replace what stands between the marks of the peers by the first size; the plot has two."""
    shown = [figure for figure in figures if figure.section == figures[0].section]
    fill_in(path, _MARK, [*table(shown), machine(facts)])


def _drawn(figures: Sequence[Figure]) -> list[str]:
    return list(dict.fromkeys(figure.section for figure in figures))[:2]


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Draw processor time of put and take for each size: ours in colour."""
    sections = _drawn(figures)
    canvas = Canvas(figsize=(11, 6.5), layout="constrained")
    grid = canvas.subplots(len(sections), len(KINDS), squeeze=False, sharex=True)
    for line, section in zip(grid, sections, strict=True):
        for axes, kind in zip(line, KINDS, strict=True):
            ending = f": {kind}: processor"
            bars = {
                figure.name.removesuffix(ending): figure.value
                for figure in reversed(figures)
                if figure.section == section and figure.name.endswith(ending)
            }
            colours = ["tab:orange" if name.startswith("ours") else "tab:gray" for name in bars]
            shown = axes.barh(list(bars), list(bars.values()), color=colours)
            axes.bar_label(shown, fmt="{:,.0f}", padding=3, fontsize="small")
            axes.set(title=f"{kind}, {section}", xscale="log", xlim=(50, 500_000))
    canvas.supxlabel("microseconds of processor time for a group, client and servers")
    canvas.savefig(path, dpi=110)
