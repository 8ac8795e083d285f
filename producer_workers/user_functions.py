"""Load each function and class that a config names, to report a wrong name before models load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from buffer.errors import ConfigError, raise_together
from buffer.imports import is_dotted_path, load_function, load_object
from producer_workers.agent_loops.agent_loop import has_agents, load_class
from producer_workers.config.producing import ProducingConfig
from producer_workers.config.sandbox import BUBBLEWRAP, is_url
from producer_workers.config.task import TaskSection
from producer_workers.judges.load import load_judge
from producer_workers.user_code.sandbox import check_sandbox
from producer_workers.worker.task_runner import load_sample_filter


class NamedFunction(NamedTuple):
    """A function or class: the key of the config that names it, and what imports it."""

    key: str
    load: Callable[[], object]  # raises ConfigError


def check_functions(functions: Iterable[NamedFunction]) -> None:
    """Import them. Raises ConfigError with the names of all that cannot be imported."""
    errors = []
    for function in functions:
        try:
            function.load()
        except ConfigError as error:
            errors.append(error)
    raise_together(errors)


def named_functions(config: ProducingConfig, *, for_judges: bool = True) -> list[NamedFunction]:
    """Return the user's functions; `for_judges`: also those that only `rolloutmq judge` imports."""
    found: list[NamedFunction] = []
    for name, task in config.tasks.items():
        found += _of_a_task(config, name, task, for_judges=for_judges)
    return list({function.key: function for function in found}.values())


def _of_a_task(
    config: ProducingConfig, name: str, task: TaskSection, *, for_judges: bool
) -> Iterator[NamedFunction]:
    strategy = config.strategy_of(name)
    if rule := strategy.should_continue_fn:
        load = partial(load_function, rule, kind="should_continue_fn")
        yield NamedFunction(f"should_continue_fn = {rule}", load)
    if (keep := strategy.is_valid_sample_fn) and not task.eval_of:
        yield NamedFunction(f"is_valid_sample_fn = {keep}", partial(load_sample_filter, keep))
    loop = task.loop(config.worker.agent_loop)
    yield NamedFunction(f"agent_loop = {loop}", partial(load_class, loop))
    if has_agents(loop):
        check = partial(_check_options, loop, task.agent_loop_options)
        yield NamedFunction(f"agent_loop_options of task {name}", check)
    for option, spec in _options(task):
        kind = f"{option} of an agent loop"
        yield NamedFunction(f"{option} = {spec}", partial(load_object, spec, kind=kind))
    if "python" in task.agent_loop_options.get("tools", ()):
        sandbox = task.agent_loop_options.get("sandbox", BUBBLEWRAP)
        yield NamedFunction(f"tools = python in {sandbox}", partial(check_sandbox, sandbox))
    if for_judges or not task.judging.is_elsewhere:
        for judge in task.judges:
            if not is_url(judge) and judge not in task.attached:
                yield NamedFunction(f"judge = {judge}", partial(load_judge, judge, task.judging))


def _check_options(loop: str, options: Mapping[str, Any]) -> None:
    load_class(loop).check_options(options)


def _options(task: TaskSection) -> Iterator[tuple[str, str]]:
    # options that name functions and classes
    for option in ("agent", "environment", "tools", "action", "observation"):
        given = task.agent_loop_options.get(option, ())
        for spec in [given] if isinstance(given, str) else given:
            if isinstance(spec, str) and is_dotted_path(spec):
                yield option, spec
