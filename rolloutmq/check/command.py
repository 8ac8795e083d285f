"""`rolloutmq check`: find the mistakes of a config before a GPU is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from buffer.errors import ConfigError, HubError, ModelError
from buffer.limits import Bytes
from buffer.readable import format_size
from rolloutmq.check.contained import STAGES, run_units
from rolloutmq.check.finding import SECTIONS, Finding, Level, failure
from rolloutmq.check.machine import count_gpus, gpu_bytes, machine_errors
from rolloutmq.check.memory import memory_findings
from rolloutmq.check.shape import Shape, context_tokens, shape_of
from rolloutmq.command_list import command
from rolloutmq.config.config import Config
from rolloutmq.config.load import inspect_config
from rolloutmq.options import AsJson, ConfigPath, Overrides
from rolloutmq.output import console as open_console
from rolloutmq.output import emit, plural, table
from rolloutmq.presets import find_config

GpuMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Memory of a GPU, for example 80GB.  [default: that of this machine's]"
    ),
]


MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "error": ("BAD", "bold red")}

PROMPT_LINES = 10
PROMPT_CHARACTERS = 800  # of a prompt in the report


@command("Run", "check", epilog="Example: rolloutmq check mine.toml --set plan.steps=20")
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    gpu_memory: GpuMemory = None,
    as_json: AsJson = False,
) -> None:
    """Find the mistakes of a config before a GPU is used.

    Imports what it names, opens the data sets, shows a prompt, scores two answers with each judge,
    tests the model's architecture, trains a small model on made-up rollouts, and estimates memory.
    Starts no server and no engine. Exits with 1 if the run would fail.
    """
    size = _parse_size(gpu_memory)
    screen = open_console()
    with screen.status("checking…") if screen.is_terminal and not as_json else nullcontext():
        findings = check_config(config, overrides or [], size)
    if as_json:
        facts = [asdict(each) for each in findings]
        for each in facts:
            del each["exit_code"]  # it is for a run
        emit({"config": str(config), "findings": facts})
    else:
        _show(screen, findings)
    if any(found.level == "error" for found in findings):
        raise typer.Exit(1)


def check_config(path: Path, overrides: Sequence[str], size: int | None = None) -> list[Finding]:
    """Return everything that is found, in the order of the report; `size`: bytes of a GPU."""
    try:
        path = find_config(path)
        config, problems = inspect_config(path, overrides)
    except ConfigError as error:
        return [failure("config", error)]
    size = size or gpu_bytes()
    found = [*config_findings(config, problems), *machine_findings(config, size)]
    if config.training_tasks:
        command = [str(path), *overrides]
        with ThreadPoolExecutor(len(STAGES)) as pool:
            for stage in pool.map(lambda stage: list(run_units([stage], command)), STAGES):
                found += stage
        found += _estimates(config, size)
    return sorted(found, key=lambda finding: SECTIONS.index(finding.section))


def _estimates(config: Config, size: int | None) -> Iterator[Finding]:
    try:
        shape = shape_of(config)
    except (ModelError, HubError):
        return  # the stage of the model reports it
    yield from context_findings(config, shape)
    yield from memory_findings(config, shape, size)


def _parse_size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return TypeAdapter[int](Bytes).validate_python(text)
    except ValidationError as error:
        raise ConfigError(
            f"--gpu-memory {text}: expected a number of bytes, or text like 80GB"
        ) from error


# -- the config and this machine ------------------------------------------------------------------


def config_findings(config: Config, problems: Sequence[str]) -> Iterator[Finding]:
    """Yield the mistakes of the file, and settings that are allowed but hardly meant."""
    for problem in problems:
        yield Finding("config", "error", problem)
    for warning in config.warnings():
        yield Finding("config", "warning", warning)
    if not problems:
        tasks = plural(len(config.training_tasks), "training task")
        groups = plural(config.plan.batch_size, "group")
        steps = plural(config.plan.steps, "step")
        what = f"run {config.run.name}: {tasks}, {steps} of {groups}, engine {config.engine.kind}"
        yield Finding("config", "ok", what)


def machine_findings(config: Config, gpu_bytes: int | None) -> Iterator[Finding]:
    """Yield what this machine lacks; only warn if it has no GPU, as the run may be elsewhere."""
    gpus = count_gpus()
    found = plural(gpus, "GPU") if gpus else "no GPU"
    size = f"; memory is compared with {format_size(gpu_bytes)}" if gpu_bytes else ""
    yield Finding("machine", "ok", f"{found}{size}")
    for error in machine_errors(config):
        level: Level = "error" if gpus else "warning"
        yield Finding("machine", level, f"{error.message}, so a run cannot start here", error.hint)


def context_findings(config: Config, shape: Shape) -> Iterator[Finding]:
    """Yield why prompts and responses do not fit into the context of the model."""
    asked = getattr(config.engine, "max_model_len", None)
    if config.engine.loads_model and asked and shape.positions and asked > shape.positions:
        yield Finding(
            "model",
            "error",
            f"[engine] max_model_len = {asked:,} exceeds what the model reads, "
            f"{shape.positions:,} tokens: the engine refuses to start",
            f"lower it to {shape.positions}, or use a model with a longer context",
        )
    if asked is None and config.engine.loads_model:
        # where the config names the limit, it was compared when the file was read
        problem = config.context_problem(context_tokens(config), config.tasks)
        if problem:
            yield Finding("model", "error", problem)
    yield from _vocabulary_findings(config, shape)


def _vocabulary_findings(config: Config, shape: Shape) -> Iterator[Finding]:
    """Yield why a trainer would refuse the tokens of an engine."""
    for key, ids in config.engine.token_ids.items():
        if ids > shape.vocabulary:
            has = f"the model has {shape.vocabulary:,} token ids"
            yield Finding(
                "model",
                "error",
                f"[engine] {key} = {getattr(config.engine, key):,}, and {has}: "
                "the trainer would refuse every group",
                f"leave {key} out: the default is the model's",
            )


# -- the report -----------------------------------------------------------------------------------


def _show(screen: Console, findings: Sequence[Finding]) -> None:
    """Print a line for each finding, the prompts, and the verdict."""
    grid = table("", "", "")
    shown = ""
    for found in (each for each in findings if not each.text):
        mark, style = MARKS[found.level]
        fix = Text(f"\n{found.fix}", style="dim") if found.fix else Text()
        title = "" if found.section == shown else found.section
        grid.add_row(title, Text(mark, style=style), Text(found.what) + fix)
        shown = found.section
    grid.show_header = False
    screen.print(grid)
    for found in findings:
        if found.text:
            screen.print(Panel.fit(Text(_cut(found.text)), title=found.what, title_align="left"))
    screen.print(_verdict(findings))


def _cut(text: str) -> str:
    lines = text[:PROMPT_CHARACTERS].splitlines()[:PROMPT_LINES]
    shown = "\n".join(lines)
    return shown if len(shown) == len(text) else f"{shown}…"


def _verdict(findings: Sequence[Finding]) -> Text:
    errors = sum(found.level == "error" for found in findings)
    warnings = sum(found.level == "warning" for found in findings)
    if errors:
        return Text(f"{plural(errors, 'error')}, {plural(warnings, 'warning')}", style="bold red")
    if warnings:
        return Text(f"no errors, {plural(warnings, 'warning')}", style="yellow")
    return Text("nothing is wrong", style="green")
