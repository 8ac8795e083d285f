"""Samples of a step as rows of a table, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from consumer.handle.sample_log import Sample

COLUMNS = (
    *("step", "why", "gid", "task", "rollout", "score", "rewards", "prompt", "response"),
    *("ground_truth", "tokens", "finish_reason", "versions", "staleness"),
)  # one row per rollout


def is_due(step: int, every: int) -> bool:
    return step == 1 or step % every == 0


def of_task(task: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics `eval/*` of a task as `eval/<task>/*`."""
    return {f"eval/{task}/{name.removeprefix('eval/')}": v for name, v in metrics.items()}


def sample_rows(sample: Sample) -> Iterator[list[Any]]:
    truth = sample.get("ground_truth")
    for member in sample["members"]:
        reward = member["reward"] or {}
        yield [
            *(sample["step"], sample["why"], sample["gid"], sample["task"]),
            *(member["index"], reward.get("score"), _json(reward)),
            *(prompt_text(sample), response_text(member)),
            *(None if truth is None else _text(truth), member["tokens"], member["finish_reason"]),
            *(_versions(member), sample["staleness"]),
        ]


def sample_text(sample: Sample) -> str:
    """Return a group as Markdown in which all that a model wrote is a code block."""
    parts = [f"**{sample['gid']}** ({sample['why']})", code_block(prompt_text(sample))]
    for member in sample["members"]:
        reward = _json(member["reward"] or {})
        facts = (f"#{member['index']} {reward}", f"{member['tokens']} tokens", _versions(member))
        parts += [code_block(", ".join(facts)), code_block(response_text(member))]
    return "\n\n".join(parts)


def prompt_text(sample: Sample) -> str:
    messages = [f"{m.get('role')}: {_text(m.get('content'))}" for m in sample.get("messages", [])]
    return "\n\n".join(messages) or sample.get("prompt") or ""


def response_text(member: dict[str, Any]) -> str:
    turns = member.get("turns")
    return "".join(turn["text"] for turn in turns) if turns else member["response"]


def code_block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _versions(member: dict[str, Any]) -> str:
    versions = sorted({span["version"] for span in member["spans"] if span["length"]})
    return "weights " + ", ".join(str(version) for version in versions) if versions else "-"


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)
