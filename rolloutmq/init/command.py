"""`rolloutmq init`: write the folder of a new project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rolloutmq.check.machine import count_gpus
from rolloutmq.command_list import command
from rolloutmq.init.project import KINDS, TINY, Choices, write_project

EPILOG = """
\b
Examples: rolloutmq init my-run --template math
          rolloutmq init mine --template tools --model Qwen/Qwen3-1.7B
"""

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder of the project.")]
TemplateName = Annotated[
    str, typer.Option("--template", help=f"What is learned: {', '.join(KINDS)}.")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model folder, id of the Hugging Face Hub, or tiny: a model with random weights, "
        f"which the run builds.  [default: {DEFAULT_MODEL}, or tiny without a GPU]"
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="JSONL or Parquet file, folder, or id of the Hub.  [default: a sample of problems]"
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(min=0, max=1024, help="GPUs of the run.  [default: those of this machine]"),
]


@command("Run", "init", epilog=EPILOG)
def init(
    folder: Folder,
    template: TemplateName,
    model: Model = None,
    data: Data = None,
    gpus: Gpus = None,
) -> None:
    """Write the folder of a new project: a config, problems, a judge, a test and a README."""
    gpus = count_gpus() if gpus is None else gpus
    names = write_project(
        folder, Choices(template, model or (DEFAULT_MODEL if gpus else TINY), data, gpus)
    )
    typer.echo(f"wrote {folder}: {', '.join(names)}\n")
    typer.echo(f"next:\n  cd {folder}\n  python -m pytest\n  rolloutmq check config.toml")
    typer.echo("  rolloutmq run config.toml")
