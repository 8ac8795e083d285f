"""`rolloutmq check`: find the mistakes of a config before a GPU is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from typer import Option

from buffer.errors import ConfigError, HubError, ModelError
from buffer.limits import Bytes
from buffer.readable import format_size
from rolloutmq.check.contained import STAGES, run_units
from rolloutmq.check.finding import SECTIONS, Finding, failure, findings_of
from rolloutmq.check.machine import count_gpus, gpu_bytes, machine_errors
from rolloutmq.check.memory import Shape, context_tokens, memory_findings, shape_of
from rolloutmq.command_list import command
from rolloutmq.config.config import Config
from rolloutmq.config.load import inspect_config
from rolloutmq.options import AsJson, ConfigPath, Overrides
from rolloutmq.output import console as open_console
from rolloutmq.output import emit, plural, table
from rolloutmq.presets import find_config

GpuMemory = Annotated[
    str | None,
    Option(
        metavar="SIZE", help="Memory of a GPU, for example 80GB.  [default: that of this machine's]"
    ),
]

MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "error": ("BAD", "bold red")}


@command("check", epilog="Example: rolloutmq check mine.toml --set plan.steps=20")
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    gpu_memory: GpuMemory = None,
    as_json: AsJson = False,
) -> None:
    """Find the mistakes of a config before a GPU is used.

    Imports what it names, opens the data sets, shows a prompt, scores two answers with each judge,
    and estimates memory. Starts no server and no engine. Exits with 1 if the run would fail.
    """
    try:
        size = TypeAdapter[int](Bytes).validate_python(gpu_memory) if gpu_memory else None
    except ValidationError as error:
        what = f"--gpu-memory {gpu_memory}: expected a number of bytes, or text like 80GB"
        raise ConfigError(what) from error
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
    found = list(settings_findings(config, problems, size or gpu_bytes()))
    if config.training_tasks:
        command = [str(path), *overrides]
        found += run_units(STAGES, command)
    return sorted(found, key=lambda finding: SECTIONS.index(finding.section))


def settings_findings(
    config: Config, problems: Sequence[str], gpu_bytes: int | None
) -> Iterator[Finding]:
    """Yield what the settings alone tell: of the config, this machine, the model and memory."""
    ok, warning, mistake = findings_of("config")
    yield from map(mistake, problems)
    yield from map(warning, config.warnings())
    if not problems:
        tasks = plural(len(config.training_tasks), "training task")
        steps = f"{plural(config.plan.steps, 'step')} of {plural(config.plan.batch_size, 'group')}"
        what = f"run {config.run.name}: {tasks}, {steps}, engine {config.engine.kind}"
        yield ok(what)
    gpus = count_gpus()
    size = f"; memory is compared with {format_size(gpu_bytes)}" if gpu_bytes else ""
    yield Finding("machine", "ok", f"{plural(gpus, 'GPU') if gpus else 'no GPU'}{size}")
    for error in machine_errors(config):
        # without a GPU here, the run is meant for another machine
        what = f"{error.message}, so a run cannot start here"
        yield Finding("machine", "error" if gpus else "warning", what, error.hint)
    if config.training_tasks:
        with suppress(ModelError, HubError):  # the stage of the model reports it
            shape = shape_of(config)
            yield from _context_findings(config, shape)
            yield from memory_findings(config, shape, gpu_bytes)


def _context_findings(config: Config, shape: Shape) -> Iterator[Finding]:
    """Yield why an engine cannot start with this model, or a trainer refuses its tokens."""
    _, _, mistake = findings_of("model")
    asked = getattr(config.engine, "max_model_len", None)
    if config.engine.loads_model and asked and shape.positions and asked > shape.positions:
        yield mistake(
            f"[engine] max_model_len = {asked:,} exceeds what the model reads, "
            f"{shape.positions:,} tokens: the engine refuses to start",
            f"lower it to {shape.positions}, or use a model with a longer context",
        )
    # where the config names the limit, it was compared when the file was read
    context = None if asked or not config.engine.loads_model else context_tokens(config)
    if problem := config.context_problem(context, config.tasks):
        yield mistake(problem)
    for key, ids in config.engine.token_ids.items():
        if ids > shape.vocabulary:
            yield mistake(
                f"[engine] {key} = {getattr(config.engine, key):,}, and the model has "
                f"{shape.vocabulary:,} token ids: the trainer would refuse every group",
                f"leave {key} out: the default is the model's",
            )


def _show(screen: Console, findings: Sequence[Finding]) -> None:
    """Print a line for each finding, the prompts, and the verdict."""
    grid = table("", "", "")
    grid.show_header = False
    shown = ""
    for found in (each for each in findings if not each.text):
        fix = Text(f"\n{found.fix}", style="dim") if found.fix else Text()
        title = "" if found.section == shown else found.section
        grid.add_row(title, Text(*MARKS[found.level]), Text(found.what) + fix)
        shown = found.section
    screen.print(grid)
    for found in findings:
        if text := found.text:
            lines = "\n".join(text[:800].splitlines()[:10])
            cut = lines if len(lines) == len(text) else f"{lines}…"
            screen.print(Panel.fit(Text(cut), title=found.what, title_align="left"))
    errors, warnings = (sum(f.level == level for f in findings) for level in ("error", "warning"))
    said = f"{plural(errors, 'error') if errors else 'no errors'}, {plural(warnings, 'warning')}"
    style = "bold red" if errors else "yellow" if warnings else "green"
    screen.print(Text(said if errors or warnings else "nothing is wrong", style=style))
