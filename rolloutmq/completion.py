"""Complete names in a shell: presets, templates, settings; also runs, tasks and workers.

Only a server that answers at once is asked. `--help` imports this file, so that it imports others
at the key press.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buffer.redis.store import Store
    from buffer.run import Run

PATIENCE_S = 0.5  # a person waits for the shell


@contextmanager
def _server(context: Any) -> Iterator[Store]:
    """Open the server of the options so far. Raises StoreUnavailable; starts no server."""
    from buffer.errors import StoreUnavailable
    from rolloutmq.options import connected, find_server

    address = find_server(context.params.get("redis_url"), context.params.get("run_dir"))
    if address.server and not address.server.is_running:
        raise StoreUnavailable(f"{address} is not running")
    with connected(address, PATIENCE_S) as store:
        yield store


def _of_run(read: Callable[[Run], Iterable[str]], context: Any) -> list[str]:
    from buffer.run import Run
    from rolloutmq.options import choose_run

    with _server(context) as store:
        return list(read(Run.open(store, choose_run(store, context.params.get("run")))))


def _configs(_: Any) -> list[str]:
    from rolloutmq.presets import preset_names

    return [*preset_names(), *sorted(path.name for path in Path().glob("*.toml"))]


def _templates(_: Any) -> Iterable[str]:
    from rolloutmq.init.command import KINDS

    return KINDS


def _runs(context: Any) -> list[str]:
    from buffer.run import Run

    with _server(context) as store:
        return Run.names(store, damaged=True)


_tasks = partial(_of_run, lambda run: run.limits.tasks)
_workers = partial(_of_run, lambda run: (worker.id for worker in run.fleet.workers()))


def _settings(context: Any) -> list[str]:
    from buffer.control.live_settings import LiveSettings, LiveTaskSettings

    names = [name for name in LiveSettings.model_fields if name != "tasks"]
    for task in _named(_tasks, context):
        names += [f"tasks.{task}.{name}" for name in LiveTaskSettings.model_fields]
    return [f"{name}=" for name in names]


NAMES: dict[str, Callable[[Any], Iterable[str]]] = {
    "config": _configs,
    "template": _templates,
    "run": _runs,
    "delete": _runs,
    "task": _tasks,
    "worker": _workers,
    "groups": _workers,
    "settings": _settings,
}
"""What a parameter of this name can be."""


def complete_names(command: Any) -> Any:
    """Let a shell complete the parameters of a command that are in `NAMES`; return the command."""
    for parameter in command.params:
        if parameter.name in NAMES:
            parameter.shell_complete = partial(_complete, parameter.name)
    return command


def _complete(name: str, context: Any, incomplete: str) -> list[Any]:
    from rolloutmq.command_list import ITEM

    found = _named(NAMES[name], context)
    return [ITEM(each) for each in found if each.startswith(incomplete)]


def _named(names: Callable[[Any], Iterable[str]], context: Any) -> Iterable[str]:
    """Return the names; nothing where they cannot be read, for a message would spoil the line."""
    from buffer.errors import RolloutMQError

    try:
        return names(context)
    except (RolloutMQError, OSError):
        return []
