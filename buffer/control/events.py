"""What a run tells those who watch it: its events, and the newest metrics of its trainer.

`steps.jsonl` in the trainer's folder has the whole history of metrics.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from buffer.redis.key_fields import text_fields
from buffer.redis.keys import Keys
from buffer.redis.store import Store

Event = tuple[int, str, dict[str, str]]  # milliseconds since 1970, name, fields

START = "0"  # the position before the oldest event that is kept


class EventLog:
    """Reads the events of one run; continue after the id of an event."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    def newest(self) -> str:
        """Return the id of the newest event; START without events."""
        found = self._newest(1)
        return found[0][0].decode() if found else START

    def last(self, count: int) -> list[Event]:
        """Return the newest events, oldest first."""
        return [parse_event(entry) for entry in reversed(self._newest(count))]

    def _newest(self, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        found: list[tuple[bytes, dict[bytes, bytes]]] = self._store.ask(
            "events", "XREVRANGE", self._keys.events, "+", "-", "COUNT", count
        )
        return found

    def read(
        self, after: str = START, *, limit: int = 500, block_ms: int | None = None
    ) -> list[tuple[str, Event]]:
        """Return (id, event) of events after an id, oldest first; wait `block_ms` for one."""
        key = self._keys.events
        reply: Any = self._store.retrying(
            "events", lambda: self._store.client.xread({key: after}, count=limit, block=block_ms)
        )
        if not reply:
            return []
        entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
        # RESP3 wraps the entries of a stream in one more list
        entries = entries[0] if entries and isinstance(entries[0], list) else entries
        return [(entry[0].decode(), parse_event(entry)) for entry in entries]


def parse_event(entry: tuple[bytes, dict[bytes, bytes]]) -> Event:
    identity = entry[0].decode()
    fields = text_fields(entry[1])
    return int(identity.partition("-")[0]), fields.pop("event", "?"), fields


REPORTED = frozenset(
    {
        "rewards/mean", "loss/policy", "policy/entropy", "policy/kl_old", "policy/kl_ref",
        "policy/clip_fraction", "optim/grad_norm", "response_len/mean", "response_len/tokens",
        "staleness/mean", "staleness/max", "time/step_s", "time/wait_s", "time/train_s",
        "time/pause_s", "time/publish_s", "eval/accuracy", "eval/score",
        "eval/groups", "eval/failed", "eval/oldest_version", "eval/newest_version",
        "eval/temperature", "cost/total", "cost/step", "cost/million_trained",
        "cost/next_100_steps", "cost/idle_workers", "cost/idle_trainer", "cost/never_trained",
    }
)  # fmt: skip
"""Names of reported metrics: a fixed set bounds a report's size."""

REWARD_OF_TASK = "rewards/mean/"
"""Prefix of the mean score of one task's groups in a batch."""

LENGTH_BIAS = "length_bias/"
"""Prefix of what shows whether long responses are trained (buffer/control/length_counts.py)."""

CURRENCY = "cost/in/"
"""Prefix of a metric that is 1: its name ends with the currency of all costs."""

PREFIXES = (REWARD_OF_TASK, LENGTH_BIAS, "expired/", CURRENCY)
"""Prefixes of reported metrics whose names end with a task, or a currency."""


def currency_of(metrics: Iterable[str]) -> str:
    """Return the currency in the names of a step's metrics; "" without prices."""
    return next((n.removeprefix(CURRENCY) for n in metrics if n.startswith(CURRENCY)), "")


EVALUATION = "eval:"


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """The reported metrics of one train step, or of an evaluation after it."""

    step: int
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, float]) -> ReportedStep:
        shown = {
            name: float(value)
            for name, value in metrics.items()
            if name in REPORTED or name.startswith(PREFIXES)
        }
        return cls(step, shown)

    def encode(self) -> str:
        """Return the report as JSON, with NaN and Infinity as they are."""
        return json.dumps({"step": self.step, "metrics": self.metrics})


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The last train step that a trainer reported, and the last evaluation of each task."""

    training: ReportedStep | None = None
    evaluations: Mapping[str, ReportedStep] = field(default_factory=dict)

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> TrainerReport:
        """Return the report in the fields of the key `report`, without those that are no JSON."""
        steps = {}
        for name, entry in fields.items():
            try:
                found: dict[str, Any] = json.loads(entry)
                metrics = {metric: float(value) for metric, value in found["metrics"].items()}
                steps[name] = ReportedStep(int(found["step"]), metrics)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                # written by hand: no reason to refuse the whole view of a run
                continue
        evaluations = {
            name.removeprefix(EVALUATION): step
            for name, step in steps.items()
            if name.startswith(EVALUATION)
        }
        return cls(steps.get("train"), evaluations)

    def reward_of(self, task: str, *, is_only: bool) -> float | None:
        """Return a task's mean score in the last batch, if any; `is_only`: it is the only task."""
        metrics = self.training.metrics if self.training else {}
        return metrics.get(REWARD_OF_TASK + task, metrics.get("rewards/mean") if is_only else None)
