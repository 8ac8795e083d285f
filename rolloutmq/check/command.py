"""`rolloutmq check`: find the mistakes of a config before a GPU is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from buffer.errors import ConfigError, HubError, ModelError
from buffer.readable import Bytes
from rolloutmq.check.contained import run_stage
from rolloutmq.check.finding import SECTIONS, STAGES, Finding, failure
from rolloutmq.check.machine import count_gpus, gpu_bytes
from rolloutmq.check.memory import memory_findings
from rolloutmq.check.pace import PROMPT, time_findings
from rolloutmq.check.report import show
from rolloutmq.check.settings import config_findings, context_findings, machine_findings
from rolloutmq.check.shape import shape_of
from rolloutmq.command_list import command
from rolloutmq.config.config import Config
from rolloutmq.config.load import inspect_config
from rolloutmq.options import AsJson, ConfigPath, Overrides
from rolloutmq.output import console as open_console
from rolloutmq.output import emit
from rolloutmq.presets import find_config

GpuMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of a GPU, for example 80GB.  [default: that of this machine's]",
    ),
]


@command("Run", "check", epilog="Example: rolloutmq check mine.toml --set plan.steps=20")
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    gpu_memory: GpuMemory = None,
    as_json: AsJson = False,
) -> None:
    """Find the mistakes of a config before a GPU is used.

    Imports what it names, opens the data sets, shows a prompt, scores two answers with each judge,
    tests the model's architecture, and estimates memory and time. Starts no server and no engine.
    Exits with 1 if the run would fail.
    """
    size = _parse_size(gpu_memory)
    screen = open_console()
    with screen.status("checking…") if screen.is_terminal and not as_json else nullcontext():
        findings = check_config(config, overrides or [], size)
    if as_json:
        emit({"config": str(config), "findings": [asdict(each) for each in findings]})
    else:
        show(screen, findings)
    if any(found.level == "error" for found in findings):
        raise typer.Exit(1)


def check_config(path: Path, overrides: Sequence[str], size: int | None = None) -> list[Finding]:
    """Return everything that is found, in the order of the report; `size`: bytes of a GPU."""
    try:
        path = find_config(path)
        config, problems = inspect_config(path, overrides)
    except ConfigError as error:
        return [failure("config", error)]
    gpus = count_gpus()
    size = size or gpu_bytes()
    found = [*config_findings(config, problems), *machine_findings(config, gpus, size)]
    if config.training_tasks:
        command = [str(path), *overrides]
        with ThreadPoolExecutor(len(STAGES)) as pool:
            stages = pool.map(lambda stage: list(run_stage(stage, command)), STAGES)
            found += [finding for stage in stages for finding in stage]
        found += _estimates(config, gpus, size, found)
    return sorted(found, key=lambda finding: SECTIONS.index(finding.section))


def _estimates(
    config: Config, gpus: int, size: int | None, found: Sequence[Finding]
) -> Iterator[Finding]:
    lengths = [each.tokens for each in found if each.tokens is not None]
    try:
        shape = shape_of(config)
    except (ModelError, HubError):
        return  # the stage of the model reports it
    yield from context_findings(config, shape)
    yield from memory_findings(config, shape, size)
    yield from time_findings(config, shape, gpus, fmean(lengths or [PROMPT]))


def _parse_size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return TypeAdapter[int](Bytes).validate_python(text)
    except ValidationError as error:
        raise ConfigError(
            f"--gpu-memory {text}: expected a number of bytes, or text like 80GB"
        ) from error
