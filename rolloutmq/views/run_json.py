"""A view of a run as JSON, for `--json` of the commands and for the browser view.

What an account, a task's progress or a worker's record counts, and what `numbers` lists, is here
without being named.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from buffer.control.control import RoleHolder
from buffer.control.worker_record import WorkerRecord
from rolloutmq.views.explain.shares import shares_of
from rolloutmq.views.number_rows import json_of
from rolloutmq.views.run_view import RunView, TaskView

_RUN = ("run", "mode", "phase", "paused_by", "stuck_on", "created_ms", "acknowledged", "currency")
_SHARE = ("share", "number", "total", "level")


def describe(view: RunView) -> dict[str, Any]:
    control, memory = view.control, view.memory
    return (
        _named(view, _RUN)
        | json_of(view)
        | {
            "nonce": view.meta.get("nonce"),
            "mode_age_ms": view.paused_ms,
            "epoch": int(control.get("epoch", 0)),
            "open_lanes": control.get("lanes", "").split(),
            "weights": view.weights._asdict() | {"path": control.get("weights_path", "")},
            "steps": {"taken": view.taken, "committed": view.committed, "freed": view.freed},
            "trainer": _role_json(view.trainer),
            "producer": _role_json(view.producer),
            "tasks": {task.account.task: _task_json(task, view.now_ms) for task in view.tasks},
            "workers": [worker_json(worker, view) for worker in view.workers],
            "ended_workers": [worker_json(worker, view) for worker in view.ended_workers],
            "memory": {f"{name}_bytes": number for name, number in asdict(memory).items()},
            "adds_up": not view.faults,
            "faults": list(view.faults),
        }
    )


def _named(thing: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def _role_json(role: RoleHolder) -> dict[str, Any]:
    return {"state": role.word, "silent_ms": role.silent_ms}


def _task_json(task: TaskView, now_ms: int) -> dict[str, Any]:
    counts = asdict(task.account)
    account = {name: n for name, n in counts.items() if name != "task" and "_bits" not in name}
    return {
        **task.counters,
        **account,
        "places": task.account.stages,
        **json_of(task),
        "backlog": task.backlog,
        "staleness": task.staleness,
        "trouble": task.trouble(now_ms),
        "shares": {share.name: _named(share, _SHARE) for share in shares_of(task)},
        "stale_threshold": None if task.is_eval else task.stale_threshold,
    }


def worker_json(worker: WorkerRecord, view: RunView) -> dict[str, Any]:
    registered_ms = max(0, view.now_ms - worker.joined_ms) if worker.joined_ms else None
    fields = asdict(worker)
    del fields["lengths"]  # of some hundred responses, for the trainer
    retries: dict[str, dict[str, int]] = {}
    for (task, cause), number in worker.retries.items():
        retries.setdefault(task, {})[cause] = number
    return fields | {
        "retried": retries,
        "silent_ms": worker.silent_ms if worker.seen_ms else None,
        "registered_ms": registered_ms,
        "judge_s": worker.judging_ms / 1000 / worker.judged if worker.judged else None,
        "judge_p50_s": worker.judge_times.quantile_s(0.5),
        "judge_p99_s": worker.judge_times.quantile_s(0.99),
        "alive": worker.is_live(view.lease_ms),
    }
