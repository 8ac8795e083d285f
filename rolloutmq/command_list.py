"""The list of all commands, of which only the one that is called is imported.

Importing all of them takes most of a second, at each `--help` and at each completion in a shell.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer import core
from typer.core import TyperGroup
from typer.main import get_command

SETTINGS = {"help_option_names": ["-h", "--help"]}

SECTIONS = {
    "Run": (
        "init",
        "check",
        "run",
        "stop",
        "create",
        "train",
        "worker",
        "producer",
        "judge",
        "audit",
        "eval",
        "simulate",
    ),
    "Look": (
        "status",
        "top",
        "runs",
        "ls",
        "show",
        "batch",
        "tail",
        "logs",
        "workers",
        "report",
        "web",
        "metrics",
    ),
    "Steer": ("pause", "resume", "drain", "set", "fence", "dead", "requeue", "drop"),
    "Data": ("save", "restore", "export", "import", "problems", "warm-start", "export-model"),
    "Administration": ("server", "doctor", "fsck", "janitor", "acl", "key", "scripts", "gpu-check"),
}
"""Sections of `--help`, with their commands."""

SUMMARIES = {
    "rolloutmq.check.command": {
        "check": "Find the mistakes of a config before a GPU is used.",
    },
    "rolloutmq.init.command": {
        "init": "Write the folder of a new project.",
    },
    "rolloutmq.launch.commands": {
        "run": "Start a whole run on this machine, or continue it.",
        "create": "Make the run of a config on its server, and start nothing.",
        "train": "Start the trainer of a run, or one rank of it.",
        "eval": "Evaluate a checkpoint or a model on the held-out tasks of a config.",
        "warm-start": "Build and warm-start the small model of a config.",
        "export-model": "Write the model of a checkpoint as a Hugging Face folder.",
        "gpu-check": "Check the pipeline on one CUDA GPU.",
    },
    "rolloutmq.cli.processes": {
        "worker": "Start one rollout worker.",
        "producer": "Start the producer.",
        "judge": "Judge rollouts of tasks whose judging is of kind rq.",
        "problems": "Write generated problems to the run's folder, and check what the "
        "config names.",
    },
    "rolloutmq.cli.audit": {
        "audit": "Compute logprobs of some groups of each batch again, and bar workers that "
        "differ.",
    },
    "rolloutmq.cli.simulate": {
        "simulate": "Simulate a fleet and a trainer with your numbers.",
    },
    "rolloutmq.cli.status": {
        "status": "Show the state of a run: groups, weights, workers, staleness.",
    },
    "rolloutmq.cli.top": {
        "top": "Watch a run live; q or Ctrl-C quits.",
    },
    "rolloutmq.cli.runs": {
        "runs": "List the runs of a server and the run folders under ./runs, or delete a run "
        "of a server.",
    },
    "rolloutmq.cli.groups": {
        "ls": "List the groups of a run that match a query.",
    },
    "rolloutmq.cli.dead": {
        "dead": "List dead letters, newest first.",
        "requeue": "Put a dead group, or one of a pool, back into the queue.",
        "drop": "End a group that waits, is in a pool, or is dead.",
    },
    "rolloutmq.cli.show": {
        "show": "Show one group: its stage, texts, rewards and versions.",
    },
    "rolloutmq.cli.batch": {
        "batch": "Show the groups of a train step.",
    },
    "rolloutmq.cli.tail": {
        "tail": "Follow the events of a run, until it is finished or Ctrl-C.",
    },
    "rolloutmq.cli.logs": {
        "logs": "Show the logs of a run's processes, merged by time.",
    },
    "rolloutmq.launch.stop": {
        "stop": "Stop a run that `rolloutmq run` started, and wait for its end.",
    },
    "rolloutmq.cli.workers": {
        "workers": "List the workers of a run.",
    },
    "rolloutmq.cli.fence": {
        "fence": "Revoke all groups that a worker holds, and remove the worker.",
    },
    "rolloutmq.cli.report": {
        "report": "Write a run's folder as one HTML file, to send or to keep.",
    },
    "rolloutmq.web.command": {
        "web": "Show a run in a browser, until Ctrl-C.",
    },
    "rolloutmq.cli.metrics": {
        "metrics": "Show runs in the format of Prometheus.",
    },
    "rolloutmq.cli.pause": {
        "pause": "Pause a run until `rolloutmq resume`.",
        "resume": "End the operator's pause of a run.",
        "drain": "Finish the running groups and claim no new ones.",
    },
    "rolloutmq.cli.settings": {
        "set": "Change settings of a run while it continues.",
    },
    "rolloutmq.cli.data": {
        "save": "Save a run to a folder: groups, order, counters, batches.",
        "restore": "Restore a saved run to a server.",
    },
    "rolloutmq.cli.curate": {
        "export": "Write groups to a file, one line per rollout.",
        "import": "Put completed groups from a file into the pools of a run.",
    },
    "rolloutmq.cli.server": {
        "server": "Start or stop the embedded server of a run.",
        "janitor": "Revoke expired leases, expire old groups, free unused data.",
    },
    "rolloutmq.cli.doctor": {
        "doctor": "Check the server, and report what each run waits for.",
    },
    "rolloutmq.cli.fsck": {
        "fsck": "Check that nothing is lost and nothing was trained twice.",
    },
    "rolloutmq.cli.signing_key": {
        "key": "Create the key with which a worker signs what it submits.",
    },
    "rolloutmq.cli.scripts": {
        "acl": "Print users for the server's ACL file, one per role.",
        "scripts": "List the Lua scripts, one per state change.",
    },
}
"""The first sentence of each command's help, by module and name."""

ALIASES = {"continue": "resume"}
"""Former names of commands, which no help lists."""

_MODULES = {name: module for module, listed in SUMMARIES.items() for name in listed}

_ITEM: Any = vars(core)["CompletionItem"]
"""typer's type of a proposal, which has no public name."""


class LazyGroup(TyperGroup):
    """Finds a command in its module when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, without importing one."""
        return [name for names in SECTIONS.values() for name in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command; None if there is none of this name."""
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in _MODULES:
            return None
        return commands_of(_MODULES[name])[name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of `--help`."""
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, SUMMARIES[_MODULES[name]][name]) for name in names])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the names that begin with `incomplete`, without importing a command."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        # typer's own method imports all commands; the next one completes options
        options = super(TyperGroup, self).shell_complete(ctx, incomplete)
        return [_ITEM(name, help=SUMMARIES[_MODULES[name]][name]) for name in names] + options


def all_commands() -> dict[str, Any]:
    """Import and return all commands by name, in the order of `--help`."""
    known: dict[str, Any] = {}
    for module in SUMMARIES:
        known |= commands_of(module)
    return {name: known[name] for names in SECTIONS.values() for name in names}


def commands_of(module: str) -> dict[str, Any]:
    """Import a module of commands; return those that it registers, by name."""
    # typer makes no group of a single command without a callback
    app = typer.Typer(rich_markup_mode=None, callback=lambda: None, context_settings=SETTINGS)
    import_module(module).register(app)
    commands: dict[str, Any] = vars(get_command(app))["commands"]
    return commands
