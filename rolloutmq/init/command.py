"""`rolloutmq init`: write the folder of a new project."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.prompt import IntPrompt, Prompt

from buffer.errors import ConfigError
from rolloutmq.check.machine import count_gpus
from rolloutmq.command_list import command
from rolloutmq.init.project import KINDS, TINY, Choices, write_project
from rolloutmq.output import console as open_console

EPILOG = """
\b
Examples: rolloutmq init my-run --template math
          rolloutmq init mine --template tools --model Qwen/Qwen3-1.7B
"""

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder of the project.")]
TemplateName = Annotated[
    str | None, typer.Option("--template", help=f"What is learned: {', '.join(KINDS)}.")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model folder, id of the Hugging Face Hub, or tiny: a model with random weights, "
        f"built here.  [default: {DEFAULT_MODEL}, or tiny without a GPU]"
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
    template: TemplateName = None,
    model: Model = None,
    data: Data = None,
    gpus: Gpus = None,
) -> None:
    """Write the folder of a new project.

    It has a config, a sample of problems, a judge, a test and a README. On a terminal, what is not
    given is asked for; else --template must be given.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        choices = _ask(template, model, data, gpus)
    elif template is None:
        raise ConfigError(
            "--template is missing",
            hint=f"give one of {', '.join(KINDS)}, for example --template math",
        )
    else:
        gpus = count_gpus() if gpus is None else gpus
        choices = Choices(template, model or _default_model(gpus), data, gpus)
    if choices.template not in KINDS:
        raise ConfigError(
            f"there is no template {choices.template!r}", hint=f"known: {', '.join(KINDS)}"
        )
    names = write_project(folder, choices)
    typer.echo(f"wrote {folder}: {', '.join(names)}\n")
    typer.echo(f"next:\n  cd {folder}\n  python -m pytest\n  rolloutmq check config.toml")
    typer.echo("  rolloutmq run config.toml")


def _ask(template: str | None, model: str | None, data: str | None, gpus: int | None) -> Choices:
    screen = open_console()
    if template is None:
        for name, about in KINDS.items():
            screen.print(f"  {name:<6} {about}")
        template = Prompt.ask("template", choices=list(KINDS), default="math", console=screen)
    if gpus is None:
        gpus = IntPrompt.ask("GPUs of the run", default=count_gpus(), console=screen)
    if model is None:
        model = Prompt.ask(
            "model: folder, id of the Hub, or tiny", default=_default_model(gpus), console=screen
        )
    if data is None:
        data = Prompt.ask("data: file, id of the Hub, or sample", default="sample", console=screen)
    return Choices(template, model, None if data == "sample" else data, gpus)


def _default_model(gpus: int) -> str:
    return DEFAULT_MODEL if gpus else TINY
