"""Where one group is, in words: what commands say before they move it."""

from __future__ import annotations

from buffer.errors import ConfigError
from buffer.keys import split_group_id
from buffer.run import Run


def describe_place(run: Run, gid: str) -> str:
    """For example "running on host7-1" or "completed, made by weights 12". ConfigError where there is no such group."""
    task, draw = split_group_id(gid)
    if task not in run.limits.tasks:
        raise ConfigError(f"run {run.name!r} has no task {task!r}", hint=f"its tasks: {', '.join(run.limits.tasks)}")
    record = run.record(gid)
    match record.get("stage"):
        case None:
            places = run.account.places(task, draw)
            if not places:
                raise ConfigError(f"{gid} was never started", hint="see rolloutmq ls")
            return places[0]
        case "running":
            return f"running on {record['owner']}"
        case "taken":
            return f"in batch {record['batch']}"
        case "pool":
            made_by = f", made by weights {record['version']}" if record.get("version") else ""
            return record["status"] + made_by
        case "dead":
            return f"dead: {run.dead_letters.reason(gid)['reason']}"
        case stage:
            return str(stage)
