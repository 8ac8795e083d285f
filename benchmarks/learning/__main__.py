"""`python -m benchmarks.learning`: reward by step and by wall time for several staleness bounds; about 20 minutes.

Writes results/points.jsonl (one line per step and trial, as they come) and results/learning.png into this folder.
Where sampling is slower than training, staleness stays far below its bound: `--at-bound` makes it the bound.
`--quick`: two bounds, one seed, few steps.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import orjson
import torch
import typer

from benchmarks.learning.plot import plot
from benchmarks.learning.sums import make_model
from benchmarks.learning.trial import Setting, run_trial
from buffer.server.embedded import EmbeddedServer

HERE = Path(__file__).parent


def main(
    bounds: Annotated[str, typer.Option(help="staleness bounds, with commas")] = "0,1,2,4,8",
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 60,
    results: Annotated[Path, typer.Option(help="where points and plot go")] = HERE / "results",
    at_bound: Annotated[bool, typer.Option("--at-bound", help="let staleness be its bound; nothing overlaps")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="two bounds, one seed, 12 steps")] = False,
) -> None:
    """Train the same small model at every bound, with and without correction."""
    if quick:
        bounds, seeds, steps = "0,4", 1, 12
    settings = [
        Setting(int(bound), corrected, seed, steps, at_bound=at_bound)
        for seed in range(seeds)
        for bound in bounds.split(",")
        for corrected in (True, False)
    ]
    torch.set_num_threads(1)  # the fleet has the other core
    results.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "server") as server:
        model = make_model(Path(folder))
        with (results / "points.jsonl").open("wb") as lines:
            for setting in settings:
                for point in run_trial(server.url, model, setting, Path(folder), typer.echo):
                    trial = {"bound": setting.staleness, "corrected": setting.corrected, "seed": setting.seed}
                    lines.write(orjson.dumps(trial | point) + b"\n")
                lines.flush()
    plot(results / "points.jsonl", results / "learning.png")


if __name__ == "__main__":
    typer.run(main)
