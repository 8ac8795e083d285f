"""A view of a run as JSON, for `--json` of the commands and for the browser view."""

from __future__ import annotations

from typing import Any

from buffer.control.role_holder import RoleHolder
from buffer.control.worker_record import WorkerRecord
from rolloutmq.views.run_view import RunView, TaskView


def describe(snap: RunView) -> dict[str, Any]:
    return {
        "run": snap.run,
        "nonce": snap.meta.get("nonce"),
        "created_ms": int(snap.meta.get("created_ms", 0)),
        "mode": snap.mode,
        "paused_by": snap.paused_by,
        "mode_age_ms": snap.paused_ms,
        "epoch": int(snap.control.get("epoch", 0)),
        "acknowledged": snap.acknowledged,
        "open_lanes": snap.control.get("lanes", "").split(),
        "weights": snap.weights._asdict() | {"path": snap.control.get("weights_path", "")},
        "steps": {"taken": snap.taken, "committed": snap.committed, "freed": snap.freed},
        "trainer": _role_json(snap.trainer),
        "producer": _role_json(snap.producer),
        "curriculum_error": snap.control.get("curriculum_error") or None,
        "tasks": {task.account.task: _task_json(task, snap.now_ms) for task in snap.tasks},
        "workers": [_worker_json(worker, snap) for worker in snap.workers],
        "tokens_per_s": snap.tokens_per_s,
        "leases": snap.leases,
        "judging": snap.judging,
        "overdue_leases": snap.overdue,
        "dead_letters": snap.dead,
        "garbage": snap.garbage,
        "memory": {
            "held_bytes": snap.memory.held,
            "low_bytes": snap.memory.low,
            "high_bytes": snap.memory.high,
        },
        "adds_up": not snap.faults,
        "faults": list(snap.faults),
    }


def _task_json(task: TaskView, now_ms: int) -> dict[str, Any]:
    return {
        "places": task.account.stages,
        "enqueued": task.account.enqueued,
        "put": task.account.put,
        "imported": task.account.imported,
        "cursor": task.account.cursor,
        "target": task.account.target,
        "consumed": task.account.consumed,
        "in_flight": task.in_flight,
        "in_flight_limit": task.in_flight_limit,
        "backlog": task.backlog,
        "ready": task.ready,
        "too_old": task.too_old,
        "trouble": task.trouble(now_ms),
        "stale_threshold": None if task.is_eval else task.stale_threshold,
        "staleness": task.staleness,
        "mean_reward": task.mean_reward,
        **{name: int(task.number(name)) for name in _COUNTERS},
    }


_COUNTERS = (
    "produced_samples", "produced_tokens", "produced_groups", "produced_ms", "unparsed", "failed",
    "leases_lost", "expirations", "ended_early", "discarded_tokens", "unmade_tokens", "reasserted",
    "regenerated",
)  # fmt: skip


def _role_json(role: RoleHolder) -> dict[str, Any]:
    return {"state": role.word, "silent_ms": role.silent_ms}


def _worker_json(worker: WorkerRecord, snap: RunView) -> dict[str, Any]:
    names = (
        "id", "engine", "state", "weights", "silent_ms", "holds", "judging", "tokens_per_s",
        "done", "failed", "quarantined", "concurrency", "requests", "judged", "judge_failures",
        "replaced", "refusal", "bad_groups", "barred_for_ms",
    )  # fmt: skip
    known = {name: getattr(worker, name) for name in names}
    registered_ms = max(0, snap.now_ms - worker.joined_ms) if worker.joined_ms else None
    return known | {
        "registered_ms": registered_ms,
        "failed_audit": snap.failed_audits.get(worker.id, ""),
        "facts": dict(worker.facts),
    }
