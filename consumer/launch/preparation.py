"""What a run needs before its processes start: a server, problems, a model. Everything is made once and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from buffer.config_file import ConfigFile
from buffer.embedded import EmbeddedServer
from buffer.errors import ModelError, RolloutMQError
from buffer.open_run import embedded_server
from buffer.run_config import ReasoningGymDataset
from consumer.model_folder import check_model_folder


def start_server(config: ConfigFile, flag: str | None) -> tuple[str, EmbeddedServer | None]:
    """The URL of the run's server, and the embedded one if the run has one of its own."""
    if url := config.redis.resolve_url(flag):
        return url, None
    server = embedded_server(config)
    server.start()
    return server.url, server


def prepare_problems(config: ConfigFile, command: Sequence[str]) -> None:
    """Let the producing side write generated problems, which the warm start reads as well."""
    if any(isinstance(task.dataset, ReasoningGymDataset) for task in config.tasks.values()):
        _run(["problems", *command])


def prepare_model(config: ConfigFile, command: Sequence[str]) -> Path:
    """The model to start from: the config's, else a small one that is built and warm-started here, once."""
    if config.policy.model is not None:
        check_model_folder(config.policy.model)
        return config.policy.model
    folder = config.run.folder / "model"
    if not folder.exists():
        _run(["warm-start", *command], quiet=False)
    check_model_folder(folder)
    return folder


def _run(args: list[str], *, quiet: bool = True) -> None:
    """A sub-command in a process of its own: torch and the data set packages leave this one alone."""
    done = subprocess.run(
        [sys.executable, "-m", "rolloutmq", *args],
        stdout=subprocess.DEVNULL if quiet else None,
        env=os.environ,
        check=False,
    )
    if done.returncode:
        error: RolloutMQError = ModelError(f"`rolloutmq {args[0]}` ended with exit code {done.returncode}; see above")
        error.exit_code = done.returncode if done.returncode > 0 else 1
        raise error
