"""`python -m benchmarks.learning`: measure staleness by step and by time.

Every bound with every loss, rate and seed, at its bound (reward by step); then, overlapping, every
bound with the default loss (reward by wall time). A trial takes half a minute of a core; a finished
one is one line of `learning.jsonl`, and is not run again: stop it when you like. The plot is made
of the lines. `--quick`: two bounds, one seed, few steps, elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import orjson
import torch
import typer

from benchmarks.learning.plot import plot
from benchmarks.learning.sums import make_model
from benchmarks.learning.trial import LOSSES, Setting, run_trial
from buffer.redis.server.embedded import EmbeddedServer

RESULTS = Path(__file__).parents[1] / "results"


def grid(
    bounds: list[int], losses: list[str], rates: list[float], seeds: int, steps: int
) -> list[Setting]:
    """Return the settings seed by seed: who stops early has all bounds and losses."""
    at_bound = [
        Setting(bound, loss, rate, seed, steps)
        for seed in range(seeds)
        for bound in bounds
        for rate in rates
        for loss in losses
    ]
    overlapping = [
        Setting(bound, "default", rate, seed, steps, overlaps=True)
        for seed in range(seeds)
        for bound in bounds
        for rate in rates
        if "default" in losses
    ]
    return at_bound + overlapping


def missing(settings: Sequence[Any], file: Path) -> list[Any]:
    """Return the settings (dataclasses) that have no line yet."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    done = [orjson.loads(line)["setting"] for line in lines]
    return [setting for setting in settings if asdict(setting) not in done]


def measure(url: str, model: Path, setting: Setting, folder: Path) -> bytes:
    """Format one trial as a line.

    `load` is the system's load average of the last minute.
    """
    cpu = time.process_time()
    points, sample_s = run_trial(url, model, setting, folder)
    used = time.process_time() - cpu
    load = os.getloadavg()[0]
    typer.echo(
        f"{setting.name}: {points[0]['reward']:.2f} to {points[-1]['reward']:.2f}, "
        f"{used:.0f} s of a core"
    )
    columns = {name: [round(point[name], 4) for point in points] for name in points[0]}
    sums = {"cpu_s": round(used, 1), "load": round(load, 1), "sample_s": round(sample_s, 4)}
    return orjson.dumps({"setting": asdict(setting)} | sums | columns)


def main(
    bounds: Annotated[str, typer.Option(help="staleness bounds, with commas")] = "0,1,2,4,8",
    losses: Annotated[str, typer.Option(help="names in LOSSES, with commas")] = ",".join(LOSSES),
    rates: Annotated[str, typer.Option(help="learning rates, with commas")] = "1e-3",
    overlapping: Annotated[bool, typer.Option(help="reward by wall time, too")] = True,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 100,
    results: Annotated[
        Path, typer.Option(help="where learning.jsonl and learning.png go")
    ] = RESULTS,
    quick: Annotated[
        bool, typer.Option("--quick", help="two bounds, one seed, 12 steps; keeps nothing")
    ] = False,
) -> None:
    """Train the same small model at every bound."""
    torch.set_num_threads(1)  # an overlapping fleet has the other core
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if quick:
            bounds = "0,4"
            seeds = 1
            steps = 12
            results = folder
        results.mkdir(parents=True, exist_ok=True)
        file = results / "learning.jsonl"
        with EmbeddedServer(folder / "server") as server:
            model = make_model(folder)
            settings = grid(
                [int(bound) for bound in bounds.split(",")],
                losses.split(","),
                [float(rate) for rate in rates.split(",")],
                seeds,
                steps,
            )
            settings = [each for each in settings if overlapping or not each.overlaps]
            for setting in missing(settings, file):
                line = measure(server.url, model, setting, folder)
                with file.open("ab") as lines:
                    lines.write(line + b"\n")
        plot(file, results / "learning.png")


if __name__ == "__main__":
    typer.run(main)
