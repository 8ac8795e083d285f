"""Describe what a run waits for until its first train step."""

from __future__ import annotations

from rolloutmq.console import plain
from rolloutmq.output import age, count
from rolloutmq.views.run_view import RunView, TaskView

_LOADING = {"trainer": "loads the model", "producer": "opens the data sets"}


def starting_lines(snap: RunView, started_s: dict[str, float]) -> list[str]:
    """Return a line for each process that has not joined yet, and for what is made for step 1.

    `started_s`: by process that the launcher has started, the seconds since then.
    """
    if snap.mode == "finish":
        return []
    joined = {worker.id for worker in snap.live_workers}
    joined |= {role.role for role in (snap.trainer, snap.producer) if role.is_alive}
    missing = {name: 1000 * s for name, s in started_s.items() if name not in joined}
    lines = [
        f"{name} {what}, {age(missing.pop(name))}"
        for name, what in _LOADING.items()
        if name in missing
    ]
    lines += _loading(missing)
    if snap.taken == 0 and started_s:
        lines += [_progress(task) for task in snap.tasks if sum(task.account.stages.values())]
    return lines


def _loading(workers_ms: dict[str, float]) -> list[str]:
    """Return which workers load their engines, in one line however many they are."""
    if not workers_ms:
        return []
    first = next(iter(workers_ms))
    who = f"{first} loads its engine"
    if len(workers_ms) > 1:
        who = f"{first} and {len(workers_ms) - 1} more load their engines"
    return [f"{who}, {age(max(workers_ms.values()))}"]


def _progress(task: TaskView) -> str:
    """Return how many groups of a task are made, of an evaluation or for the first batch."""
    places = task.account.stages
    open_ = places["waiting"] + places["running"]
    name = plain(task.account.task)
    if task.is_eval:
        return (
            f"{name} is evaluated: {count(sum(places.values()) - open_)} done, {count(open_)} open"
        )
    return f"{name}: {count(task.ready)} groups ready for step 1, {count(open_)} waiting or running"
