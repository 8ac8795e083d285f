"""`rolloutmq report`: write a run's folder as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buffer.errors import ConfigError
from rolloutmq.command_list import command
from rolloutmq.options import RUNS
from rolloutmq.output import console
from rolloutmq.run_owner import choose_folder
from rolloutmq.web.report import write_report

EPILOG = """
\b
Examples: rolloutmq report
          rolloutmq report runs/demo -o demo.html
"""


@command("Look", "report", epilog=EPILOG)
def report(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN_FOLDER]",
            help="Folder of the run. Default: the one under ./runs that runs, or was used last.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Default: report.html in the run's folder."
        ),
    ] = None,
) -> None:
    """Write a run's folder as one HTML file, to send or to keep.

    It has curves, evaluations, samples, settings, versions and the account, and needs neither a
    server nor a network. Texts of rollouts are in it.
    """
    run_folder = choose_folder(folder, RUNS)
    file = output or run_folder / "report.html"
    size = write_report(run_folder, file)
    if not size:
        raise ConfigError(
            f"{run_folder} has no train step and no evaluation",
            hint="`rolloutmq runs` lists the run folders and their steps",
        )
    console().print(f"{file}: {size / 1e6:.1f} MB", soft_wrap=True)
