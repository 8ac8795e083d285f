"""A new run that goes on from a checkpoint of another one, which stays as it is.

    runs/b/config.toml                    the config of that step, with the overrides
           checkpoints/step-000040/       the state (links to the parent's files), and a position of
                                          the new run: its draws go on where the parent's were
           steps.jsonl, evaluations.jsonl  of the parent, up to the step
           archive/, terms/               what proves these steps, as far as the parent has it

What was in flight is generated anew. Until the run is on its server, `fork` may be repeated: it
keeps the nonce, and makes all else again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
from rich.text import Text
from typer import Option

from buffer.config.assignments import assign
from buffer.errors import ConfigError
from buffer.run.open import embedded_server, open_store, run_nonce
from consumer.handle.checkpoint import DIGEST, POSITION, CheckpointFolder
from consumer.handle.step_log import EVALUATIONS_FILE, STEPS_FILE
from rolloutmq.command_list import command
from rolloutmq.config.config import Config
from rolloutmq.extensions.records.archive import Archive
from rolloutmq.extensions.records.folders import (
    ParentFolder,
    beside,
    checkpoint_of,
    choose_parent,
    link_checkpoint,
    link_file,
    log_lines,
    new_run,
)
from rolloutmq.extensions.records.step_file import config_of
from rolloutmq.launch.create import create_again
from rolloutmq.launch.terms import FOLDER as TERMS
from rolloutmq.options import AsJson, ConfigUrl, Output, Overrides
from rolloutmq.output import console

CONFIG = "config.toml"


@command("fork", epilog="Example: rolloutmq fork runs/demo --at 110 --name b --set plan.steps=200")
def fork_run(
    at: Annotated[int, Option("--at", min=1, help="Checkpoint to go on from.")],
    name: Annotated[str, Option(help="Name of the new run, and of its folder.")],
    folder: ParentFolder = None,
    overrides: Overrides = None,
    redis_url: ConfigUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make a run that goes on from a checkpoint of another one, with other settings.

    It has the weights, the optimizer and the draws of that step, and the config that the step was
    trained with. What was in flight is generated anew. The other run is only read, and may go on.
    """
    parent = choose_parent(folder)
    target = beside(parent, name)
    with new_run(target, "fork", at, keep=["run.json"]), ExitStack() as stack:
        config = fork(parent, at, target, list(overrides or []))
        url = config.redis.resolve_url(redis_url)
        if not url:
            server = embedded_server(config)
            stack.enter_context(server.reading())
            url = server.url
        store = stack.enter_context(closing(open_store(config, url, name="rolloutmq-fork")))
        say = partial(console(stderr=as_json).print, soft_wrap=True)
        create_again(store, config, config.model_folder, say)
    file = target / CONFIG
    Output(
        {"run": name, "folder": str(target), "config": str(file), "step": at},
        [Text(f"run {name} continues at step {at + 1}: rolloutmq run {file}")],
    ).print(as_json=as_json)


def fork(parent: Path, step: int, folder: Path, overrides: Sequence[str]) -> Config:
    """Make a run in `folder`, but not on a server; return its config.

    Raises ConfigError where the parent does not have the checkpoint, or its terms.
    """
    source = checkpoint_of(parent, step)
    position = CheckpointFolder(source.parent).read(step)
    terms = parent / TERMS / f"{position.terms_of(step)}.json"
    data = terms.read_bytes() if terms.exists() else Archive(parent / "archive").read(terms.name)
    if data is None:
        raise ConfigError(
            f"{parent} does not say which config the step was trained with",
            hint="only steps of `rolloutmq train`, `run` and `replay` can be forked",
        )
    tree: dict[str, Any] = orjson.loads(data)["config"]
    own = config_of(tree, run={"dir": str(parent)})
    tree["run"] |= {"name": folder.name, "dir": str(folder)}
    tree["policy"]["model"] = str(own.model_folder)
    for override in overrides:
        assign(tree, override)
    config = config_of(tree)
    target = CheckpointFolder(folder / "checkpoints")
    path = target.begin(step)
    link_checkpoint(source, path, POSITION, POSITION + DIGEST)
    position.run, position.run_nonce = folder.name, run_nonce(folder)
    position.forget(step)
    target.complete(position, path)
    for log in (STEPS_FILE, EVALUATIONS_FILE):
        lines = [_without_costs(line) for number, line in log_lines(parent / log) if number <= step]
        (folder / log).write_bytes(b"".join(lines))
    for name in ("archive", TERMS):
        for file in sorted((parent / name).glob("*.*")):
            number = re.fullmatch(r"step-(\d+)\.rmq", file.name)
            if file.is_file() and (number is None or int(number[1]) <= step):
                (folder / name).mkdir(exist_ok=True)
                link_file(file, folder / name / file.name)
    (folder / CONFIG).write_text("\n".join([*toml_lines(tree), ""]), encoding="utf-8")
    return config


def _without_costs(line: bytes) -> bytes:
    """Return a line of a log without what the parent has paid: the new run's costs begin at 0."""
    entry = orjson.loads(line)
    metrics = entry.get("metrics", {})
    entry["metrics"] = {n: value for n, value in metrics.items() if not n.startswith("cost/")}
    return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)


def toml_lines(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield JSON values as lines of TOML, such as `plan.steps = 200`, but for nulls."""
    for name, value in tree.items():
        is_bare = re.fullmatch(r"[A-Za-z0-9_-]+", name)
        key = prefix + (name if is_bare else orjson.dumps(name).decode())
        if isinstance(value, Mapping) and value:
            yield from toml_lines(value, f"{key}.")
        elif value is not None:
            yield f"{key} = {_toml_value(value)}"


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(toml_lines(value))} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return orjson.dumps(value).decode()
