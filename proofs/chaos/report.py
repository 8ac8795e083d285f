"""What a chaos run leaves for people: figures as JSON and lines."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from proofs.chaos.checker import Verdict
from proofs.chaos.history import Event

TARGETS = {"faults": 200, "groups_acknowledged": 20_000}
"""What a standard run shall reach, all its runs together."""

SUMMED = ("operations", *TARGETS, "groups_trained", "lost", "doubled", "fenced", "redelivered")


def write_report(folder: Path, plan: Any, verdict: Verdict, events: Sequence[Event]) -> Path:
    """`report.json` in `folder`; its path."""
    problems = {kind: texts for kind, texts in verdict.problems.items() if texts}
    figures = verdict.figures | {"recovery_s_by_kind": recoveries(events)}
    report = {"plan": plan, "clean": verdict.clean, "figures": figures, "problems": problems}
    path = folder / "report.json"
    path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    return path


def write_sum(folder: Path, figures: Sequence[Mapping[str, Any]], longest_s: float) -> list[str]:
    """`standard.json`: several runs together, beside what they shall reach; the lines that say so."""
    total = {name: sum(one[name] for one in figures) for name in SUMMED}
    # an empty server stands still until somebody says --regenerate
    total["longest_stall_s"] = max(
        (one["longest_stall_s"] for one in figures if "empty" not in one), default=0.0
    )
    reached = {name: total[name] >= least for name, least in TARGETS.items()}
    reached |= {name: not total[name] for name in ("lost", "doubled")}
    reached["longest_stall_s"] = total["longest_stall_s"] < longest_s
    report = {"total": total, "reached": reached}
    (folder / "standard.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    marks = {True: "reached", False: "NOT REACHED"}
    return [
        f"{n.replace('_', ' '):>24}  {v}  {marks[reached[n]] if n in reached else ''}"
        for n, v in total.items()
    ]


SOAKED = {
    "faults": "faults", "failovers": "failovers", "groups_acknowledged": "groups", "steps": "steps",
    "lost": "lost", "doubled": "doubled", "results_lost": "results generated again",
    "fenced": "results fenced", "redelivered": "batches redelivered",
    "longest_stall_s": "longest stall, s",
}  # fmt: skip
"""Figures of a soak: column."""


def soak_table(found: Sequence[tuple[str, float, Verdict]]) -> list[str]:
    """Lines of Markdown: a row for each run of (servers, seconds, verdict)."""
    rows = [
        (
            name,
            f"{seconds:g}",
            *(str(verdict.figures[key]) for key in SOAKED),
            "clean" if verdict.clean else repr(verdict),
        )
        for name, seconds, verdict in found
    ]
    head = ("servers", "seconds", *SOAKED.values(), "verdict")
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def recoveries(events: Sequence[Event]) -> dict[str, float]:
    """By kind of fault, the longest time in seconds until a result was taken or a batch delivered
    again.
    """
    progress = [e["t"] for e in events if e["op"] == "delivered" or _is_accepted(e)]
    found: dict[str, float] = {}
    for event in events:
        if event["op"] == "fault" and (place := bisect_right(progress, event["t"])) < len(progress):
            seconds = round(progress[place] - event["t"], 2)
            found[event["kind"]] = max(seconds, found.get(event["kind"], 0.0))
    return found


def lines(verdict: Verdict, recovered: Mapping[str, float]) -> list[str]:
    figures = dict(verdict.figures)
    by_kind = figures.pop("faults_by_kind")
    told = [f"{name.replace('_', ' '):>24}  {value}" for name, value in figures.items()]
    for kind, number in by_kind.items():
        told.append(f"{number:>24}  {kind}; went on within {recovered.get(kind, 0.0):g} s")
    return told + [
        f"PROBLEM {kind}: {text}" for kind, texts in verdict.problems.items() for text in texts[:10]
    ]


def _is_accepted(event: Event) -> bool:
    return bool(event["op"] == "submit" and event["phase"] == "ok" and event["reply"][0] == "OK")
