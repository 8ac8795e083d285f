"""The table of README.md: what is asked, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.figure import Figure

_SERVERS = ("in memory", "durable")


class Row(NamedTuple):
    """One line of the table: figures by section and the beginning of their name.

    `benchmark` is the name that `python -m benchmarks` takes.
    """

    what: str
    benchmark: str
    figures: Sequence[tuple[str, str]]


def _both(section: str, name: str) -> list[tuple[str, str]]:
    """Return the figure of a section that runs on both servers."""
    return [(f"{section}, {server}", name) for server in _SERVERS]


ROWS = (
    Row(
        "put, batched / best `SET`: processor time",
        "put",
        _both("put", "ours / SET x"),
    ),
    Row(
        "take / best `MGET`: processor time",
        "take",
        _both("take", "ours / MGET"),
    ),
    Row(
        "put / PipelineRL's stream: processor time",
        "put",
        _both("put", "ours / PipelineRL's stream"),
    ),
    Row(
        "take / PipelineRL's stream: processor time",
        "take",
        _both("take", "ours / PipelineRL's stream"),
    ),
    Row(
        "encode, decode one group, all checks",
        "codec",
        [("one group", "encode, all checks"), ("one group", "decode, all checks")],
    ),
    Row(
        "plan of micro-batches / take",
        "pack",
        _both("pack", "plan of micro-batches / take"),
    ),
    Row(
        "all micro-batches / take",
        "pack",
        _both("pack", "all micro-batches / take"),
    ),
    Row(
        "take of 512 groups: server time",
        "scaling",
        [("scaling", "take 512, 1,000 groups")],
    ),
    Row(
        "1,000,000 groups / 1,000",
        "scaling",
        [("scaling", "take 512, 1,000,000 / ")],
    ),
    Row(
        "1,000 workers, 32 groups of 30 s each",
        "scale",
        _both("scale", "1,000 workers"),
    ),
    Row(
        "5,000 workers, 32 groups of 300 s each",
        "scale",
        _both("scale", "5,000 workers"),
    ),
    Row(
        "pause of 64 workers, p50",
        "pause",
        _both("pause, 64 workers", "p50"),
    ),
    Row(
        "pause of 64 workers, p99",
        "pause",
        _both("pause, 64 workers", "p99"),
    ),
    Row(
        "index per group",
        "memory",
        [("memory, Redis", "index per group"), ("memory, Valkey", "index per group")],
    ),
    Row(
        "pipeline / ideal queue, worst setting",
        "idle",
        [("idle, ", "")],
    ),
    Row(
        "vLLM behind the queue / vLLM alone",
        "engine",
        [("vLLM and the pipeline", "worker / engine alone")],
    ),
)


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the lines of the table; a row without a figure is left out."""
    yield "| `-m benchmarks` | what | asked | measured |"
    yield "|---|---|---:|---:|"
    for row in ROWS:
        if found := list(_found(row, figures)):
            asked = ", ".join(dict.fromkeys(map(_asked, found)))
            measured = ", ".join(dict.fromkeys(map(_measured, found)))
            yield f"| {row.benchmark} | {row.what} | {asked} | {measured} |"


def _found(row: Row, figures: Sequence[Figure]) -> Iterator[Figure]:
    """Yield the figures of a row that have a target; of many, the one that is worst."""
    for section, name in row.figures:
        fitting = [
            figure
            for figure in figures
            if figure.target is not None
            and figure.section.startswith(section)
            and figure.name.startswith(name)
        ]
        if fitting:
            yield min(
                fitting, key=lambda figure: figure.value * (1 if figure.better == "more" else -1)
            )


def _asked(figure: Figure) -> str:
    sign = "≥" if figure.better == "more" else "≤"
    unit = "" if figure.unit in ("", "x") else f" {figure.unit}"
    return f"{sign} {figure.target:,g}{unit}"


def _measured(figure: Figure) -> str:
    """Return the value, in bold type where it is not what is asked."""
    return measure(figure) if figure.met else f"**{measure(figure)}**"


def measure(figure: Figure) -> str:
    """Return the value of a figure as text."""
    return f"{figure.value:,.0f}" if abs(figure.value) >= 100 else f"{figure.value:.3g}"


def machine(facts: Mapping[str, str]) -> str:
    """Return the line that names the machine."""
    return ", ".join(f"{name} {value}" for name, value in facts.items()) + "."
