"""`rolloutmq init`: write a new project: the folder of a template and parts of `shared`."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated

import typer
from typer import Argument, Option

from buffer.errors import ConfigError, SandboxUnavailable
from buffer.readable import did_you_mean
from producer_workers.config.sandbox import BUBBLEWRAP, WEAK
from producer_workers.hub import is_id
from producer_workers.user_code.sandbox import check_sandbox
from rolloutmq.check.machine import count_gpus
from rolloutmq.command_list import command
from rolloutmq.init.sums import write_sums

TEMPLATES = Path(__file__).parent / "templates"
SHARED = TEMPLATES / "shared"

# what each template is about
KINDS = {
    "math": "A model learns to solve word problems; a function of yours scores the last number.",
    "code": "A model learns to write functions, scored by tests in a sandbox.",
    "tools": "A model learns to call a function of yours between its turns.",
    "agent": "A model learns to play a game over several turns with an environment of yours.",
}

# what each file of a template does
FILES = {
    "judge.py": "scores an answer",
    "calculator.py": "the tool",
    "game.py": "the environment, which answers the model",
    "held_out.jsonl": "problems of the evaluations, which are never trained on",
    "warm_start.jsonl": "problems whose answers the small model learns before the run",
}

TINY = "tiny"  # the model that the run builds
LEARNING = "tiny.toml"  # in the folder of a template with a sample that this model learns

# values of the templates, by model: a real one, one with random weights, and one that learns
REAL_MODEL = {"max_tokens": 1024, "steps": 100, "batch_size": 8, "tiny_model": "", "note": ""}
RANDOM_MODEL = {
    "max_tokens": 48,
    "steps": 20,
    "batch_size": 8,
    "tiny_model": """
[tiny_model]                 # without a model in [policy], the run builds one
max_positions = 2048         # longest prompt and answer together, in tokens

[warm_start]
max_steps = 0                # its weights are random
""",
    "note": """
The run builds a small model with random weights: it shows that everything works, and learns
nothing. For a real one set `[policy] model` to a folder or an id of the Hugging Face Hub, such as
"Qwen/Qwen3-0.6B", and raise `max_tokens` and `steps`.
""",
}
LEARNING_MODEL = {
    "max_tokens": 8,
    "steps": 40,
    "batch_size": 32,
    "tiny_model": "",
    "note": """
The run builds a small model and teaches it sums until it solves a third of them; then it learns
from the rewards for `data.jsonl`. On two idle processor cores this takes about two minutes. Word
problems, and problems of your own, need a real model, with other settings, which
`rolloutmq init NAME --template math --model Qwen/Qwen3-0.6B` writes.
""",
}


@dataclass(frozen=True, slots=True)
class Choices:
    """The user's choices. `data`: a file, a folder or an id of the Hub; None for the sample."""

    template: str
    model: str
    data: str | None
    gpus: int

    @property
    def learns(self) -> bool:
        """Return whether the small model can learn the sample."""
        is_small = self.model == TINY and not self.gpus and self.data is None
        return is_small and (TEMPLATES / self.template / LEARNING).exists()


def write_project(folder: Path, choices: Choices) -> list[str]:
    """Write the project and return its file names.

    Raises ConfigError for an unknown template, or a folder with files.
    """
    if choices.template not in KINDS:
        raise ConfigError(
            f"there is no template {choices.template!r}",
            hint=f"{did_you_mean(choices.template, KINDS)}known: {', '.join(KINDS)}",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty", hint="give the path of a new folder")
    values = _values(folder, choices)
    template = TEMPLATES / choices.template
    folder.mkdir(parents=True, exist_ok=True)
    for file in [SHARED / "judge.py", *sorted(template.iterdir())]:  # most have their own judge
        if file.suffix == ".py":
            _write(folder / file.name, [file], values)
        elif file.suffix == ".jsonl":
            shutil.copyfile(file, folder / file.name)
    if choices.learns:
        write_sums(folder)
    machine = {0: "cpu", 1: "one_gpu"}.get(choices.gpus, "gpus")
    engine = template / LEARNING if choices.learns else SHARED / f"{machine}.toml"
    parts = [SHARED / "head.toml", template / "task.toml", engine]
    _write(folder / "config.toml", parts, values)
    own = [name for name in FILES if (folder / name).exists()]
    values["files"] = "\n".join(f"| `{name}` | {FILES[name]} |" for name in own)
    _write(folder / "README.md", [SHARED / "README.md"], values)
    return sorted(path.name for path in folder.iterdir())


def _values(folder: Path, choices: Choices) -> dict[str, object]:
    ranks = choices.gpus // 2
    is_tiny = choices.model == TINY
    sandbox = BUBBLEWRAP
    try:
        check_sandbox(BUBBLEWRAP)
    except SandboxUnavailable:
        sandbox = WEAK
    return {
        "name": re.sub(r"[^A-Za-z0-9_.-]", "-", folder.resolve().name).lstrip("_.-")[:64] or "mine",
        "model": '# model = "Qwen/Qwen3-0.6B"' if is_tiny else f'model = "{choices.model}"',
        "dataset": _dataset(choices.data),
        "trainer_gpus": list(range(ranks)),
        "worker_gpus": list(range(ranks, choices.gpus)),
        "workers": choices.gpus - ranks,
        "about": KINDS[choices.template],
        "sandbox": sandbox,
        **(LEARNING_MODEL if choices.learns else RANDOM_MODEL if is_tiny else REAL_MODEL),
    }


def _dataset(data: str | None) -> str:
    """Return the lines of a [tasks.<name>.dataset]. Raises ConfigError for unknown data."""
    if data is None:
        return 'kind = "jsonl"\npath = "data.jsonl"'
    path = Path(data)
    if not path.exists() and is_id(path):
        return f'kind = "hugging_face"\npath = "{data}"\nsplit = "train"'
    if not path.exists():
        raise ConfigError(f"--data {data}: there is no such file", hint="or give an id of the Hub")
    where = f'path = "{path.resolve()}"'
    if path.is_dir() and not any(path.glob("[!.]*.parquet")):
        return f'kind = "hugging_face"\n{where}'
    is_lines = path.suffix in (".jsonl", ".json")
    return f'kind = "{"jsonl" if is_lines else "parquet"}"\n{where}'


def _write(file: Path, parts: list[Path], values: dict[str, object]) -> None:
    text = "".join(part.read_text(encoding="utf-8") for part in parts)
    file.write_text(Template(text).substitute(values), encoding="utf-8")


EPILOG = """
\b
Examples: rolloutmq init my-run --template math
          rolloutmq init mine --template tools --model Qwen/Qwen3-1.7B
"""

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"

Folder = Annotated[Path, Argument(metavar="FOLDER", help="New folder of the project.")]
TemplateName = Annotated[str, Option("--template", help=f"What is learned: {', '.join(KINDS)}.")]
Model = Annotated[
    str | None,
    Option(
        help="Model folder, id of the Hugging Face Hub, or tiny: a model with random weights, "
        f"which the run builds.  [default: {DEFAULT_MODEL}, or tiny without a GPU]"
    ),
]
Data = Annotated[
    str | None,
    Option(
        help="JSONL or Parquet file, folder, or id of the Hub.  [default: a sample of problems]"
    ),
]
Gpus = Annotated[
    int | None, Option(min=0, max=1024, help="GPUs of the run.  [default: those of this machine]")
]


@command("init", epilog=EPILOG)
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
