"""Draw simulated fleets: idle shares, the cost of workers, the length of pauses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure as Canvas

from benchmarks.figure import Figure


def draw_fleets(figures: Sequence[Figure], folder: Path) -> None:
    """Each picture for which there are figures."""
    pictures: dict[str, Callable[[Sequence[Figure]], Canvas]] = {
        "idle": _idle,
        "scale": _scale,
        "pause": _pause,
        "stragglers": _stragglers,
    }
    for name, picture in pictures.items():
        if chosen := [figure for figure in figures if figure.section.startswith(f"{name}, ")]:
            picture(chosen).savefig(folder / f"{name}.png", dpi=110)
    if chosen := [figure for figure in figures if figure.section == "tokens" and figure.detail]:
        _tokens(chosen).savefig(folder / "tokens.png", dpi=110)


def _idle(figures: Sequence[Figure]) -> Canvas:
    """Draw a row for each shape of lengths; solid is the pipeline, hatched the ideal."""
    whats = ("workers idle", "trainer waits", "waste")
    sections = list(dict.fromkeys(figure.section for figure in figures))
    canvas = Canvas(figsize=(13, 3.8 * len(sections)), layout="constrained")
    grid = canvas.subplots(len(sections), len(whats), squeeze=False, sharey=True)
    for row, section in zip(grid, sections, strict=True):
        for axes, what in zip(row, whats, strict=True):
            for offset, kind, hatch in ((-0.2, "pipeline", ""), (0.2, "ideal", "///")):
                shares = _values(figures, section, f": {what}, {kind}")
                places = [place + offset for place in range(len(shares))]
                axes.barh(places, list(shares.values()), height=0.38, hatch=hatch, label=kind)
                axes.set_yticks(range(len(shares)), list(shares))
            axes.set(
                title=f"{section.removeprefix('idle, ')}: {what}",
                xlabel="%",
                ylim=(len(shares) - 0.5, -0.5),
            )
    grid[0][0].legend()
    return canvas


def _tokens(figures: Sequence[Figure]) -> Canvas:
    """Draw a bar for each way and staleness: the share of each row in what was sampled."""
    rows = [name for name in dict.fromkeys(f.name.partition(": ")[2] for f in figures)]
    shares = {row: _values(figures, "tokens", f": {row}") for row in rows if row != "missing"}
    totals = {name: sum(of[name] for of in shares.values()) for name in next(iter(shares.values()))}
    canvas = Canvas(figsize=(10, 4.5), layout="constrained")
    axes = canvas.add_subplot()
    left = dict.fromkeys(totals, 0.0)
    for row, found in shares.items():
        if any(found.values()):
            widths = {name: 100 * tokens / totals[name] for name, tokens in found.items()}
            axes.barh(list(widths), list(widths.values()), left=list(left.values()), label=row)
            left = {name: left[name] + width for name, width in widths.items()}
    axes.invert_yaxis()
    axes.set(xlabel="% of sampled tokens", ylabel="on_straggler, max_staleness", xlim=(0, 100))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return canvas


def _values(figures: Sequence[Figure], section: str, ending: str) -> dict[str, float]:
    """Value by setting, of the figures of a section whose names end so."""
    chosen = [
        figure for figure in figures if figure.section == section and figure.name.endswith(ending)
    ]
    return {figure.name.removesuffix(ending): figure.value for figure in chosen}


def _scale(figures: Sequence[Figure]) -> Canvas:
    canvas = Canvas(figsize=(7, 4.5), layout="constrained")
    axes = canvas.add_subplot()
    for section in dict.fromkeys(figure.section for figure in figures):
        cores = [
            figure for figure in figures if figure.section == section and figure.unit == "cores"
        ]
        workers = [int(figure.name.removesuffix(" workers").replace(",", "")) for figure in cores]
        axes.plot(
            workers,
            [figure.value for figure in cores],
            marker="o",
            label=section.removeprefix("scale, "),
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="workers with 32 groups of 30 s each (5,000: of 300 s)",
        ylabel="cores of the server",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return canvas


def _pause(figures: Sequence[Figure]) -> Canvas:
    sections = list(dict.fromkeys(figure.section for figure in figures))
    canvas = Canvas(figsize=(5.5 * len(sections), 3.5), layout="constrained")
    for axes, section in zip(
        canvas.subplots(1, len(sections), squeeze=False)[0], sections, strict=True
    ):
        bars = [
            figure for figure in figures if figure.section == section and figure.unit == "pauses"
        ]
        axes.bar(
            [figure.name.removesuffix(" ms") for figure in bars], [figure.value for figure in bars]
        )
        axes.tick_params(axis="x", rotation=45)
        axes.set(title=section, xlabel="ms from pause() to the last receipt", ylabel="pauses")
    return canvas


def _stragglers(figures: Sequence[Figure]) -> Canvas:
    """Draw bias, step time and staleness over max_staleness: a line for each way."""
    panels = {
        "mean length": "mean trained length / started",
        "seconds a step": "seconds a step",
        "staleness": "mean staleness, steps",
    }
    sections = list(dict.fromkeys(figure.section for figure in figures))
    canvas = Canvas(figsize=(12, 3.2 * len(sections)), layout="constrained")
    grid = canvas.subplots(len(sections), len(panels), squeeze=False)
    for row, section in zip(grid, sections, strict=True):
        for axes, (what, label) in zip(row, panels.items(), strict=True):
            lines: dict[str, list[tuple[float, float]]] = {}
            for name, value in _values(figures, section, f": {what}").items():
                way, _, age = name.rpartition(", ")
                lines.setdefault(way, []).append((float(age), value))
            for way, points in lines.items():
                is_ours = way == "two limits"
                axes.plot(*zip(*points, strict=True), marker="o", lw=3 if is_ours else 1, label=way)
            axes.set(xscale="log", xlabel="max_staleness", ylabel=label, ylim=(0, None))
            axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"], minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        row[0].set_title(section.removeprefix("stragglers, "), loc="left")
    grid[0][0].legend(fontsize="small")
    return canvas
