"""The commands of `rolloutmq`: a table of their modules, so that only the called one is imported.

Importing all takes most of a second at each `--help`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from buffer.config.removed import COMMANDS as REMOVED

SETTINGS = {"help_option_names": ["-h", "--help"]}

# section of `--help` -> name -> (module in rolloutmq, first sentence of the function's docstring)
SECTIONS = {
    "Start here": {
        "init": ("init.command",
            "Write the folder of a new project: a config, problems, a judge, a test and a "
            "README."),
        "check": ("check.command", "Find the mistakes of a config before a GPU is used."),
        "run": ("launch.commands", "Start a whole run on this machine, or continue it."),
        "status": ("cli.status", "Show the state of a run: groups, weights, workers, staleness."),
        "web": ("cli.serve", "Show a run in a browser, until Ctrl-C."),
        "show": ("cli.show", "Show one group: its stage, texts, rewards and versions."),
        "doctor": ("cli.fsck", "Check the server, and report what each run waits for."),
        "report": ("cli.runs", "Write a run's folder as one HTML file, to send or to keep."),
        "stop": ("launch.commands",
            "Stop a run that `rolloutmq run` started, and wait for its end."),
    },
    "Run": {
        "create": ("launch.commands", "Make the run of a config on its server, and start nothing."),
        "eval": ("launch.commands",
            "Evaluate a checkpoint or a model on the held-out tasks of a config."),
        "gateway": ("cli.processes",
            "Serve live sessions to programs that users start themselves."),
        "judge": ("cli.processes", "Judge rollouts of tasks whose judging is of kind rq."),
        "producer": ("cli.processes", "Start the producer."),
        "simulate": ("cli.simulate", "Simulate a fleet and a trainer with your numbers."),
        "train": ("launch.commands", "Start the trainer of a run, or one rank of it."),
        "worker": ("cli.processes", "Start one rollout worker."),
    },
    "Look": {
        "batch": ("cli.show", "Show the groups of a train step."),
        "cost": ("extensions.cost.command",
            "Show where the sampled tokens of a run went, and what it has cost."),
        "logs": ("cli.logs",
            "Show the logs of a run's processes, merged by time; or, as ROLE `events`, those "
            "of its queue."),
        "ls": ("cli.groups", "List the groups of a run that match a query."),
        "metrics": ("cli.serve", "Show runs in the format of Prometheus."),
        "rejudge": ("cli.show", "Run the judge of a group's task again on its responses."),
        "runs": ("cli.runs",
            "List the runs of a server and the run folders under ./runs, or delete a run of "
            "a server."),
        "workers": ("cli.status",
            "List the workers of a run; of one that is over, those that have left."),
    },
    "Steer": {
        "dead": ("cli.groups", "List dead letters, newest first."),
        "drain": ("cli.steer", "Finish the running groups and claim no new ones."),
        "drop": ("cli.groups", "End a group that waits, is in a pool, or is dead."),
        "fence": ("cli.status", "Revoke all groups that a worker holds, and remove the worker."),
        "pause": ("cli.steer", "Pause a run until `rolloutmq resume`."),
        "requeue": ("cli.groups", "Put a dead group, or one of a pool, back into the queue."),
        "resume": ("cli.steer", "End the operator's pause of a run."),
        "set": ("cli.steer", "Change settings of a run while it continues."),
    },
    "Data": {
        "export": ("cli.data", "Write groups to a file, one line per rollout."),
        "bundle": ("extensions.records.bundle",
            "Write one step of a run as a file that `rolloutmq replay` trains on any machine."),
        "fork": ("extensions.records.fork",
            "Make a run that goes on from a checkpoint of another one, with other settings."),
        "prove": ("extensions.records.prove",
            "Tell which prompts, judges and weights made a checkpoint, and whether all is "
            "unaltered."),
        "rescore": ("extensions.records.rescore",
            "Score the archived responses of a run by another judge, and train on the new scores."),
        "replay": ("extensions.records.replay_command",
            "Train archived batches of a run again, without workers."),
        "export-model": ("launch.commands",
            "Write the model of a checkpoint as a Hugging Face folder."),
        "import": ("cli.data", "Put completed groups from a file into the pools of a run."),
        "restore": ("cli.data", "Restore a saved run to a server."),
        "save": ("cli.data",
            "Save a paused or stopped run to a folder: groups, order, counters, batches."),
        "warm-start": ("launch.commands", "Build and warm-start the small model of a config."),
    },
    "Administration": {
        "acl": ("cli.server", "Print users for the server's ACL file, one per role."),
        "fsck": ("cli.fsck", "Check that nothing is lost and nothing was trained twice."),
        "gpu-check": ("launch.commands", "Check the pipeline on one CUDA GPU."),
        "janitor": ("cli.server", "Revoke expired leases, expire old groups, free unused data."),
        "server": ("cli.server", "Start or stop the embedded server of a run."),
    },
}  # fmt: skip
MODULES = {name: row[0] for commands in SECTIONS.values() for name, row in commands.items()}
_FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {}
F = TypeVar("F", bound=Callable[..., Any])


def command(name: str, *, epilog: str) -> Callable[[F], F]:
    """Make a function the command `name`, which SECTIONS lists; its docstring is its help."""

    def mark(function: F) -> F:
        _FUNCTIONS[name] = (function, epilog)
        return function

    return mark


class LazyGroup(TyperGroup):
    """Imports a command only when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return open_command(cmd_name) if cmd_name in MODULES else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands: Any = MODULES  # the names that typer suggests for a wrong one
        options = (each.partition("=")[0] for each in args[1:])
        for name in (*args[:1], *(f"{args[0]} {option}" for option in options)):
            if instead := REMOVED.get(name):
                ctx.fail(f"{name} was removed: {instead}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        TyperCommand.format_options(self, ctx, formatter)  # type: ignore[arg-type]  # no commands

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in commands.items()])


def all_commands() -> dict[str, Any]:
    return {name: open_command(name) for name in MODULES}


@cache
def open_command(name: str) -> Any:
    import_module(f"rolloutmq.{MODULES[name]}")
    function, epilog = _FUNCTIONS[name]
    app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=SETTINGS)
    app.command(name, epilog=epilog)(function)
    return get_command(app)
