"""`rolloutmq report`: write a run's folder as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from buffer.errors import ConfigError
from rolloutmq.command_list import command
from rolloutmq.console import console
from rolloutmq.options import RUNS
from rolloutmq.run_owner import choose_folder
from rolloutmq.web.report_contents import read_contents

EPILOG = """
\b
Examples: rolloutmq report
          rolloutmq report runs/demo -o demo.html
"""

_HERE = Path(__file__).parent
_UPLOT = _HERE.parent / "web" / "static" / "uplot"


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
    contents = read_contents(run_folder)
    if len(contents["curves"]) == 1 and not contents["evaluations"]:
        raise ConfigError(
            f"{run_folder} has no train step and no evaluation",
            hint="`rolloutmq runs` lists the run folders and their steps",
        )
    page = render(contents)
    file.write_text(page, encoding="utf-8")
    console().print(f"{file}: {len(page.encode()) / 1e6:.1f} MB", soft_wrap=True)


def render(contents: dict[str, Any]) -> str:
    """Return the page; its script reads the contents from a block of JSON."""
    # < as an escape: no text can end the block
    data = orjson.dumps(contents).decode().replace("<", "\\u003c")
    parts = {
        "UPLOT_CSS": (_UPLOT / "uPlot.min.css").read_text(encoding="utf-8"),
        "UPLOT_JS": (_UPLOT / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        "PAGE_JS": (_HERE / "page.js").read_text(encoding="utf-8"),
        "DATA": data,
    }
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    before, *pieces = page.split("{{")
    for piece in pieces:
        name, _, rest = piece.partition("}}")
        before += parts[name] + rest
    return before
