"""`python -m benchmarks.gpu_day`: run the parts one after the other, and write a report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import orjson
import typer

from benchmarks.figure import Figure
from benchmarks.gpu_day.parts import Part, parts
from benchmarks.machine import machine_facts
from rolloutmq.check.machine import count_gpus

BUDGET_S = 25 * 60
"""Seconds for all parts: those that do not begin within them are left out."""

REHEARSED = ("tiny",)
SHAPES = ("0.6B", "1.7B", "4B")
TAIL = 4_000
EPILOG = (
    "Examples: make gpu-day · python -m benchmarks.gpu_day --list · python -m benchmarks.gpu_day "
    "agreement throughput · python -m benchmarks.gpu_day --rehearse 'train steps tiny'"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one part gave; `verdict` is "met", or says what is wrong."""

    name: str
    verdict: str
    seconds: float
    figures: Sequence[Figure]
    tail: str


def main(
    names: Annotated[list[str] | None, typer.Argument(help="parts; default: all")] = None,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("build/gpu-day"),
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="a tiny model, also without a GPU")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="list the parts and their limits")] = False,
    child: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure trainer, engine and queue on one CUDA GPU; write report.md and figures.json."""
    chosen = _chosen(names or [], rehearse)
    if show:
        for part in chosen:
            typer.echo(f"{part.name:28} at most {part.limit_s:.0f} s")
        return
    if child:
        _measure(chosen[0], child)
        return
    if not rehearse and not count_gpus():
        typer.echo("there is no CUDA GPU on this machine: nothing was measured", err=True)
        raise typer.Exit(3)
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    ends_s = time.monotonic() + BUDGET_S
    for part in chosen:
        outcomes.append(_run(part, out, rehearse, ends_s))
        # after each part, so that an interrupted day leaves what it had
        _write(outcomes, out)
        typer.echo(f"{part.name:28} {outcomes[-1].verdict}  ({outcomes[-1].seconds:.0f} s)")
    typer.echo(f"{out / 'report.md'}")
    if any(outcome.verdict != "met" for outcome in outcomes):
        raise typer.Exit(1)


def _chosen(names: Sequence[str], rehearse: bool) -> list[Part]:
    known = {part.name: part for part in parts(REHEARSED if rehearse else SHAPES)}
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"no part {unknown}; there are {list(known)}")
    return [known[name] for name in names] or list(known.values())


def _measure(part: Part, file: Path) -> None:
    """Measure in this process; write each figure when it is known."""
    assert part.measure
    with file.open("wb") as output:
        for figure in part.measure():
            output.write(orjson.dumps(asdict(figure)) + b"\n")
            output.flush()


def _run(part: Part, out: Path, rehearse: bool, ends_s: float) -> Outcome:
    if part.needs_vllm and not _has_vllm():
        return Outcome(part.name, "left out: vLLM is not installed", 0, (), "")
    limit_s = min(part.limit_s, ends_s - time.monotonic())
    if limit_s < 10:
        return Outcome(part.name, f"left out: {BUDGET_S // 60} minutes are over", 0, (), "")
    stem = part.name.replace(" ", "-").replace(",", "")
    file = out / f"{stem}.jsonl"
    file.unlink(missing_ok=True)
    own = [sys.executable, "-m", "benchmarks.gpu_day", part.name, "--child", str(file)]
    command = part.command or [*own, *(["--rehearse"] if rehearse else [])]
    began = time.monotonic()
    log = out / f"{stem}.log"
    code = _wait(command, log, {**os.environ, **part.env}, limit_s)
    lines = file.read_bytes().splitlines() if file.exists() else []
    figures = [Figure(**orjson.loads(line)) for line in lines]
    tail = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
    verdict = _verdict(code, figures, limit_s)
    return Outcome(part.name, verdict, time.monotonic() - began, figures, tail)


def _has_vllm() -> bool:
    from importlib.util import find_spec

    return find_spec("vllm") is not None


def _wait(command: Sequence[str], log: Path, env: dict[str, str], limit_s: float) -> int | None:
    """Run a command in a session of its own; return its exit code, None where its time was over."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=env, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # its engine processes, too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _verdict(code: int | None, figures: Sequence[Figure], limit_s: float) -> str:
    if code is None:
        return f"not finished in {limit_s:.0f} s"
    if code:
        return f"failed: exit code {code}"
    missed = [figure.name for figure in figures if figure.met is False]
    return f"missed: {', '.join(missed)}" if missed else "met"


def _write(outcomes: Sequence[Outcome], out: Path) -> None:
    data = [asdict(outcome) for outcome in outcomes]
    (out / "figures.json").write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2))
    lines = ["# GPU day", "", *(f"* {name}: {fact}" for name, fact in machine_facts().items())]
    lines += ["", "| part | verdict | seconds |", "|---|---|---|"]
    lines += [f"| {each.name} | {each.verdict} | {each.seconds:.0f} |" for each in outcomes]
    for each in outcomes:
        lines += ["", f"## {each.name}: {each.verdict}", ""]
        if each.figures:
            lines += ["| | | measured | asked |", "|---|---|---|---|"]
            lines += [_row(figure) for figure in each.figures]
        if not each.figures or each.verdict.startswith(("failed", "not finished")):
            lines += ["```", each.tail.strip(), "```"]
    (out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(figure: Figure) -> str:
    asked = "" if figure.target is None else f"{figure.target:g}"
    return f"| {figure.section} | {figure.name} | {figure.value:,.4g} {figure.unit} | {asked} |"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(epilog=EPILOG)(main)
    app()
