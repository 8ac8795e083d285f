"""The figures of all queues: as ratios to ours, and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

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
    """Replace what stands between the marks of the peers by tables of the first two sizes."""
    sizes = list(dict.fromkeys(figure.section for figure in figures))[:2]
    shown = [figure for figure in figures if figure.section in sizes]
    fill_in(path, _MARK, [*table(shown), machine(facts)])
