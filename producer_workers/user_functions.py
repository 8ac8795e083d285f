"""Load each function and class that a config names, so that a wrong name is found at once.

Engines and models take half a minute to load, and a data set may take longer: nobody should wait
for them to read that a judge cannot be imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from buffer.config.config import ProducingConfig
from buffer.config.task import TaskSection, is_url
from buffer.model.dotted_path import check_module, is_dotted_path, load_object
from buffer.model.order_policy import load_order
from producer_workers.agent_loops.agent_loop import BUILT_IN
from producer_workers.group_runs.loop_result import load_sample_filter
from producer_workers.judges.load import load_judge
from producer_workers.producer.curriculum import load_weight_function
from producer_workers.producer.strategy import load_should_continue

_NAMED_OPTIONS = ("agent", "environment", "tools")
"""The options of agent loops that name functions and classes."""


def check_functions(config: ProducingConfig, *, for_judges: bool) -> None:
    """Import everything of the user's that the config names. Raises ConfigError.

    `for_judges`: also the judges of kind rq, which only `rolloutmq judge` imports.
    """
    if config.trainer.loop:
        check_module(config.trainer.loop, kind="trainer loop")
    load_weight_function(config.plan.curriculum)
    load_order(config.policy.order, config.policy.order)
    for name, task in config.tasks.items():
        strategy = config.strategy_of(name)
        load_should_continue(strategy.should_continue_fn)
        if strategy.is_valid_sample_fn and not task.eval_of:
            load_sample_filter(strategy.is_valid_sample_fn)
        loop = task.agent_loop or config.worker.agent_loop
        load_object(BUILT_IN.get(loop, loop), kind="agent loop", built_in=BUILT_IN)
        for option, spec in _options(task):
            load_object(spec, kind=f"{option} of an agent loop")
        if task.judging.kind != "rq" or for_judges:
            for judge in task.judges:
                if not is_url(judge):
                    load_judge(judge, task.judging)


def _options(task: TaskSection) -> Iterator[tuple[str, str]]:
    for option in _NAMED_OPTIONS:
        given = task.agent_loop_options.get(option, ())
        for spec in [given] if isinstance(given, str) else given:
            if isinstance(spec, str) and is_dotted_path(spec):
                yield option, spec
