"""A run's folder as one HTML file, which needs neither a server nor a network."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from buffer.errors import RolloutMQError
from buffer.redis.connection.url import mask_url
from consumer.grpo.reporting.sample_log import SampleLog
from consumer.grpo.reporting.step_log import StepLog, read_evaluations
from rolloutmq.config.load import load_config
from rolloutmq.output import age
from rolloutmq.presets import find_config
from rolloutmq.run_owner import LaunchRecord, read_record
from rolloutmq.versions import all_versions
from rolloutmq.web.series import step_table

SAMPLED_STEPS = 6  # steps whose samples are shown: the first, the last, and some between
LONGEST = 4000  # characters that are shown of one text


_HERE = Path(__file__).parent


def write_report(folder: Path, file: Path, account: str = "") -> int:
    """Write the report of a run's folder; return its bytes, 0 for an empty one.

    `account`: that of a run which is about to end; its record has it later.
    """
    contents = read_contents(folder)
    if not (contents["curves"]["step"] or contents["evaluations"]):
        return 0
    if account:
        contents["facts"]["account"] = account
    page = _render(contents).encode()
    file.write_bytes(page)
    return len(page)


def _render(contents: dict[str, Any]) -> str:
    """Return the page; its script reads the contents from a block of JSON."""
    # < as an escape: no text can end the block
    data = orjson.dumps(contents).decode().replace("<", "\\u003c")
    parts = {
        "UPLOT_CSS": (_HERE / "static/uplot/uPlot.min.css").read_text(encoding="utf-8"),
        "UPLOT_JS": (_HERE / "static/uplot/uPlot.iife.min.js").read_text(encoding="utf-8"),
        "PAGE_JS": (_HERE / "report.js").read_text(encoding="utf-8"),
        "DATA": data,
    }
    page = (_HERE / "report.html").read_text(encoding="utf-8")
    before, *pieces = page.split("{{")
    for piece in pieces:
        name, _, rest = piece.partition("}}")
        before += parts[name] + rest
    return before


def read_contents(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    log = StepLog(folder / "steps.jsonl")
    log.read_new()
    table = step_table(log.steps)
    return {
        "run": record.run if record else folder.name,
        "facts": _facts(folder, record, log),
        "curves": {"step": table["x"], **table["columns"]},
        "evaluations": [
            {"task": task, "step": step, "metrics": metrics}
            for (task, step), metrics in sorted(read_evaluations(folder).items())
        ],
        "samples": _samples(folder),
        "settings": _settings(record),
        "versions": record.versions if record and record.versions else all_versions(),
    }


def _facts(folder: Path, record: LaunchRecord | None, log: StepLog) -> dict[str, str]:
    done = log.steps[-1].step if log.steps else 0
    seconds = sum(step.metrics.get("time/step_s", 0.0) for step in log.steps)
    groups = sum(len(step.gids) for step in log.steps)
    facts = {
        "folder": str(folder.resolve()),
        "state": record.stage if record else "not started by `rolloutmq run`",
        "steps": f"{done} of {record.steps}" if record else str(done),
        "groups trained": f"{groups:,}",
        "trained twice": str(len(log.trained_twice())),
        "time in steps": age(1000 * seconds),
        "written": time.strftime("%Y-%m-%d %H:%M"),
    }
    if record:
        facts["account"] = record.account or "not checked at its end: see rolloutmq fsck"
        facts["command"] = mask_url("rolloutmq run " + " ".join(record.command))
    return facts


def _samples(folder: Path) -> list[dict[str, Any]]:
    log = SampleLog(folder)
    span = log.steps()
    if span is None:
        return []
    first, last = span
    count = min(SAMPLED_STEPS, last - first + 1)
    steps = {round(first + (last - first) * i / max(count - 1, 1)) for i in range(count)}
    return [_sample(line) for step in sorted(steps) for line in log.read(step)]


def _sample(line: dict[str, Any]) -> dict[str, Any]:
    messages = line.get("messages") or []
    prompt = "\n\n".join(f"{each.get('role')}: {each.get('content')}" for each in messages)
    return {
        "step": line["step"],
        "why": line.get("why", ""),
        "gid": line["gid"],
        "task": line.get("task", ""),
        "prompt": (prompt or str(line.get("prompt", "")))[:LONGEST],
        "truth": str(line.get("ground_truth") or "")[:LONGEST],
        "members": [
            {
                "score": (member.get("reward") or {}).get("score"),
                "tokens": member.get("tokens"),
                "end": member.get("finish_reason") or member.get("status"),
                "text": str(member.get("response") or "")[:LONGEST],
            }
            for member in line.get("members") or []
        ],
    }


def _settings(record: LaunchRecord | None) -> dict[str, Any]:
    """Return the config of the newest start without secrets, or why it cannot be read any more."""
    if record is None or not record.command:
        return {}
    path, *flags = record.command
    overrides = [value for flag, value in pairwise(flags) if flag == "--set"]
    try:
        return load_config(find_config(Path(path)), overrides).public()
    except RolloutMQError as error:
        return {"not readable": mask_url(error.message)}
