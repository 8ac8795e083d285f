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
from collections.abc import Mapping, Sequence
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
from rolloutmq.extensions.records.new_run import ParentFolder, beside, choose_parent, new_run
from rolloutmq.extensions.records.step_file import config_of, link_checkpoint, link_file, log_lines
from rolloutmq.launch.create import create_again
from rolloutmq.launch.terms import FOLDER as TERMS
from rolloutmq.options import AsJson, ConfigUrl, Output, Overrides
from rolloutmq.output import console

CONFIG = "config.toml"

EPILOG = """
\b
Examples: rolloutmq fork runs/demo --at 110 --name b --set learner.learning_rate=1e-5
          rolloutmq run runs/b/config.toml
"""


@command("fork", epilog=EPILOG)
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
    kept = CheckpointFolder(parent / "checkpoints")
    if step not in kept.steps():
        known = ", ".join(map(str, kept.steps())) or "none"
        raise ConfigError(
            f"{parent} has no checkpoint of step {step}",
            hint=f"kept: {known}; `rolloutmq replay` to this step (--to) makes one; then "
            "fork its folder",
        )
    position = kept.read(step)
    tree = _config_tree(parent, position.terms_of(step))
    own = config_of(tree, run={"dir": str(parent)})
    tree["run"] |= {"name": folder.name, "dir": str(folder)}
    tree["policy"]["model"] = str(own.model_folder)
    for override in overrides:
        assign(tree, override)
    config = config_of(tree)
    target = CheckpointFolder(folder / "checkpoints")
    path = target.begin(step)
    link_checkpoint(kept.path(step), path, POSITION, POSITION + DIGEST)
    position.run, position.run_nonce = folder.name, run_nonce(folder)
    position.forget(step)
    target.complete(position, path)
    for log in (STEPS_FILE, EVALUATIONS_FILE):
        lines = [line for number, line in log_lines(parent / log) if number <= step]
        (folder / log).write_bytes(b"".join(lines))
    for name in ("archive", TERMS):
        for file in sorted((parent / name).glob("*.*")):
            number = re.fullmatch(r"step-(\d+)\.rmq", file.name)
            if file.is_file() and (number is None or int(number[1]) <= step):
                (folder / name).mkdir(exist_ok=True)
                link_file(file, folder / name / file.name)
    (folder / CONFIG).write_text(to_toml(tree), encoding="utf-8")
    return config


def _config_tree(parent: Path, terms: str) -> dict[str, Any]:
    """Return the config of the terms with this digest. Raises ConfigError."""
    file = parent / TERMS / f"{terms}.json"
    data = file.read_bytes() if file.exists() else Archive(parent / "archive").read(file.name)
    if not terms or data is None:
        raise ConfigError(
            f"{parent} does not say which config the step was trained with",
            hint="only steps of `rolloutmq train`, `run` and `replay` can be forked",
        )
    tree: dict[str, Any] = orjson.loads(data)["config"]
    return tree


def to_toml(tree: Mapping[str, Any], prefix: str = "") -> str:
    """Return JSON values as TOML: a table for each section, without keys that are null."""
    lines = [f"[{prefix[:-1]}]"] if prefix else []
    nested = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    values = {key: value for key, value in tree.items() if key not in nested}
    lines += [f"{_key(key)} = {_value(v)}" for key, v in values.items() if v is not None]
    lines += [to_toml(value, f"{prefix}{_key(key)}.") for key, value in nested.items()]
    return "\n".join(lines)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else orjson.dumps(name).decode()


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return orjson.dumps(value).decode()
