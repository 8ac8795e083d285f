"""Warnings about a config: settings that have no effect, or waste work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from buffer.config.run_settings import PlanSection, PolicySection
from consumer.config.learner import LearnerConfig
from consumer.config.trainer import EvaluationSection
from producer_workers.config.engine import EngineConfig
from producer_workers.config.strategy import StrategySection
from producer_workers.config.worker import WorkerSection
from rolloutmq.config.cross_section_rules import (
    Check,
    TaskSections,
    ahead,
    run_checks,
    staleness,
    training,
)
from rolloutmq.config.launch import LaunchSection

Strategies = Mapping[str, StrategySection]
"""The strategy of each task, its own keys included."""


def config_warnings(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about `sections`, given by name, with `strategies` by task."""
    return run_checks(_CHECKS, sections)


def _restarts_of_stale_work(
    policy: PolicySection, tasks: TaskSections, strategies: Strategies
) -> Iterator[str]:
    for name, task in training(tasks).items():
        strategy = strategies[name]
        keeps = strategy.enable_partial_rollout or strategy.kind == "sync"
        if policy.pause_mode == "abort" and staleness(policy, task) and not keeps:
            yield (
                f"task {name} has max_staleness = {staleness(policy, task)}, but [policy] "
                "pause_mode = abort without "
                "[strategy] enable_partial_rollout throws the tokens of unfinished rollouts away "
                "at every weight update; set enable_partial_rollout = true, or pause_mode = keep"
            )


def _sync_is_never_stale(
    policy: PolicySection, tasks: TaskSections, strategies: Strategies
) -> Iterator[str]:
    for name, task in training(tasks).items():
        is_set = task.max_staleness is not None or "max_staleness" in policy.model_fields_set
        if strategies[name].kind == "sync" and is_set and staleness(policy, task):
            yield (
                f"task {name} has max_staleness = {staleness(policy, task)}, which cannot act: "
                "[strategy] kind = sync makes only the batches that the newest weights serve; "
                "set kind = async, or max_staleness = 0"
            )


def _starts_are_trained(policy: PolicySection, tasks: TaskSections) -> Iterator[str]:
    for name, task in training(tasks).items():
        is_set = task.max_ahead is not None or "max_ahead" in policy.model_fields_set
        own = policy.max_ahead if task.max_ahead is None else task.max_ahead
        if is_set and own > staleness(policy, task):
            yield (
                f"task {name} has max_ahead = {own}, more than max_staleness = "
                f"{staleness(policy, task)}, which holds: what starts further ahead is too old"
            )


def _waits_for_what_runs(policy: PolicySection, strategies: Strategies) -> Iterator[str]:
    waiting = [name for name, each in strategies.items() if each.on_straggler == "wait"]
    if waiting and policy.pause_mode == "abort":
        yield (
            f'tasks {", ".join(waiting)} have on_straggler = "wait", but [policy] pause_mode = '
            "abort interrupts stragglers at every weight update, and those that do not run then "
            "are not waited for; set pause_mode = keep"
        )


def _requests_fit_the_engine(
    engine: EngineConfig, worker: WorkerSection, tasks: TaskSections
) -> Iterator[str]:
    slots = getattr(engine, "max_num_seqs", None)
    if slots is None or worker.concurrency == "auto":
        return
    for name, task in training(tasks).items():
        requests = worker.concurrency * task.prompt_repeat_k
        if requests > slots:
            yield (
                f"[worker] concurrency = {worker.concurrency} groups of {task.prompt_repeat_k} "
                f"rollouts (task {name}) are {requests} requests, and [engine] max_num_seqs is "
                f"{slots}: the rest waits in this engine, where no other worker can take it; "
                f"set concurrency = {max(1, slots // task.prompt_repeat_k)}, or auto"
            )


def _workers_have_work(
    plan: PlanSection,
    policy: PolicySection,
    strategy: StrategySection,
    launch: LaunchSection,
    worker: WorkerSection,
    tasks: TaskSections,
) -> Iterator[str]:
    if worker.concurrency == "auto":
        return
    most = max((ahead(policy, task) for task in training(tasks).values()), default=0)
    batches = (most + 1) * policy.sync_weights_interval
    groups = round((batches + strategy.over_sample_threshold) * plan.batch_size)
    if (launch.workers - 1) * worker.concurrency >= groups:
        yield (
            f"at most {groups} groups are in work at once ([plan] batch_size, max_ahead), "
            f"which {launch.workers - 1} of the {launch.workers} workers hold with [worker] "
            f"concurrency = {worker.concurrency}: the last one waits; use fewer workers, or a "
            f"concurrency of {max(1, groups // launch.workers)}"
        )


def _intervals_are_shorter_than_the_run(
    plan: PlanSection, policy: PolicySection, evaluation: EvaluationSection, learner: LearnerConfig
) -> Iterator[str]:
    if policy.sync_weights_interval > plan.steps:
        yield (
            f"[policy] sync_weights_interval = {policy.sync_weights_interval} is more than "
            f"[plan] steps = {plan.steps}: the workers never get trained weights"
        )
    if evaluation.every_steps is not None and evaluation.every_steps > plan.steps:
        yield (
            f"[evaluation] every_steps = {evaluation.every_steps} is more than "
            f"[plan] steps = {plan.steps}: only the first and the last weights are evaluated"
        )
    updates = plan.steps * learner.updates_per_batch
    if learner.warmup_steps > updates:
        yield (
            f"[learner] warmup_steps = {learner.warmup_steps} is more than the run's {updates} "
            "optimizer steps: the learning rate never reaches learning_rate"
        )


_CHECKS: tuple[Check, ...] = (
    _restarts_of_stale_work,
    _sync_is_never_stale,
    _starts_are_trained,
    _waits_for_what_runs,
    _requests_fit_the_engine,
    _workers_have_work,
    _intervals_are_shorter_than_the_run,
)
