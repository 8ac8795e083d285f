"""Build the model of a config that names none, and train it on a part of the run's problems."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from buffer.errors import ConfigError
from rolloutmq.config.config import Config
from rolloutmq.extensions.demo.tiny_model import build_tiny_model, build_tokenizer
from rolloutmq.output import console as open_console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rolloutmq.extensions.demo.warm_start import Demonstration, WarmStartProgress


class DemoModel:
    """The model that [tiny_model] describes and [warm_start] trains."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer(self._config.tiny_model)

    def make(self) -> None:
        """Write `<run folder>/model`, unless it exists or the config names another model.

        Raises ConfigError, DatasetError where there are no problems to train it with.
        """
        import torch

        from rolloutmq.extensions.demo.warm_start import warm_start

        # Two threads wait for each other many times a millisecond in a model this small: beside
        # other processes, a step took 16 times the processor time.
        torch.set_num_threads(1)
        config = self._config
        folder = config.run.folder / "model"
        console = open_console()
        if config.policy.model is not None:
            console.print(f"nothing to build: [policy] model = {config.policy.model}")
            return
        if folder.exists():
            console.print(f"the model exists already: {folder}")
            return
        most = config.warm_start.max_steps
        if most == 0:
            build_tiny_model(folder, config.tiny_model, config.run.seed)
            console.print(f"built a model with random weights: {folder}")
            return
        random_model = config.run.folder / "model.random"
        shutil.rmtree(random_model, ignore_errors=True)
        build_tiny_model(random_model, config.tiny_model, config.run.seed)
        started = shown = time.monotonic()
        goal = config.warm_start.stop_accuracy
        console.print(f"warm start: at most {most} steps, until accuracy {goal:.2f}")
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        is_terminal = console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=not is_terminal) as bar:
            job = bar.add_task("", total=most)

            def show(now: WarmStartProgress) -> None:
                nonlocal shown
                what = f"step {now.step} · loss {now.loss:.3f} · accuracy {now.accuracy:.2f}"
                bar.update(job, completed=now.step, description=what)
                if not is_terminal and time.monotonic() - shown >= 5.0:
                    shown = time.monotonic()
                    console.print(f"warm start: {what}")

            warm_start(random_model, folder, self._problems(), config.warm_start, show)
        shutil.rmtree(random_model)
        console.print(f"warm start: {time.monotonic() - started:.0f} s, model in {folder}")

    def _problems(self) -> list[Demonstration]:
        from rolloutmq.extensions.demo.warm_start import read_problems

        if path := self._config.warm_start.path:
            return read_problems(path)
        found: list[Demonstration] = []
        for name, task in self._config.tasks.items():
            if task.eval_of is None and task.dataset.is_generated:
                file = self._config.run.folder / "problems" / name / "warm_start.jsonl"
                if not file.exists():
                    hint = "`rolloutmq create CONFIG` writes it; warm_start_size must be set"
                    raise ConfigError(f"{file} is missing", hint=hint)
                found += read_problems(file)
        if not found:
            raise ConfigError(
                "there are no problems to warm-start a model with",
                hint="set [warm_start] path, or warm_start_size of a reasoning_gym data set, or "
                "[policy] model to one that knows the task",
            )
        return found
