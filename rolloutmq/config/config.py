"""A whole config file: every section, the rules between them, and the limits of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from buffer.config.attached import Attaching
from buffer.config.memory_budget import MemorySection, RetentionSection
from buffer.config.run_settings import (
    LeaseSection,
    PlanSection,
    PolicySection,
    RedisSection,
    RunSection,
    WeightsSection,
)
from buffer.config.section import Count, Section
from buffer.errors import ConfigError
from buffer.limits import Bytes, RunLimits, TaskLimits, TaskSettings
from buffer.run.settings import THRESHOLDS
from buffer.wire.staleness import stale_threshold
from consumer.config.critic import CriticConfig
from consumer.config.learner import LearnerConfig
from consumer.config.trainer import (
    MOST_PROBLEMS,
    EvaluationSection,
    SamplesSection,
    TrainerSection,
    WandbSection,
)
from producer_workers.config.engine import EngineConfig, VllmConfig
from producer_workers.config.producing import JudgesSection, ProducerSection, WorkerSection
from producer_workers.config.strategy import StrategySection
from producer_workers.config.task import Tasks, TaskSection
from producer_workers.hub import model_repository
from rolloutmq.config.cross_section_rules import (
    context_problems,
    memory_problem,
    rule_violations,
    staleness,
    too_many_problems,
    training,
)
from rolloutmq.config.small_model import TinyModelConfig, WarmStartConfig

Gpu = Annotated[int, Field(ge=0, le=1023)]


class LaunchSection(Section):
    """[launch]: what `rolloutmq run` starts on this machine."""

    workers: int = Field(2, ge=0, le=1024)
    """rollout workers, one process each; gateways where all tasks are live. 0: they are started by
    hand, or elsewhere
    """
    colocated: bool = False
    """trainer and workers share the same GPUs and must fit in their memory together; otherwise a
    GPU that both use is an error
    """
    trainer_ranks: int | None = Field(None, ge=1, le=1024)
    """processes of the trainer, each with one GPU and its shard of the model; default: one for each
    of trainer_gpus, or one in all with a trainer.loop of yours
    """
    trainer_gpus: list[Gpu] | None = None
    """GPUs of the trainer; default: the first ones, as many as it has processes"""
    worker_gpus: list[Gpu] | None = None
    """GPUs of the workers; each worker gets as many as its engine has shards; default: all others
    """
    judge_workers: int = Field(1, ge=1, le=1024)
    """processes that judge, if a task has judging of kind rq"""
    max_restarts: Count = Field(20, ge=0)
    """restarts of a process that died before the run ends with an error; three errors in a row
    without progress (a step that the trainer commits, a group that a worker submits) end it, too
    """
    log_bytes: Annotated[Bytes, Field(ge=1 << 16, le=1 << 50)] = 64 << 20
    """size at which the log of a process becomes NAME.log.1, in place of the older one, and
    NAME.log starts anew; as a number or text like 64MiB
    """

    def ranks(self, *, has_own_loop: bool) -> int:
        """Return the number of processes of the trainer; `has_own_loop`: with trainer.loop."""
        gpus = 1 if has_own_loop else len(self.trainer_gpus or [0])
        return self.trainer_ranks or gpus


class Config(Attaching):
    """Every section of a config file, read and checked as a whole by every process of a run.

    One that a package attaches is an `AttachedSection`.
    """

    attaches = "rolloutmq.sections"

    run: RunSection
    redis: RedisSection = RedisSection()
    lease: LeaseSection = LeaseSection()
    policy: PolicySection = PolicySection()
    weights: WeightsSection = WeightsSection()
    retention: RetentionSection = RetentionSection()
    memory: MemorySection = MemorySection()
    plan: PlanSection = PlanSection()
    strategy: StrategySection = StrategySection()
    launch: LaunchSection = LaunchSection()
    tasks: Tasks
    engine: EngineConfig = VllmConfig()
    worker: WorkerSection = WorkerSection()
    producer: ProducerSection = ProducerSection()
    judges: JudgesSection = JudgesSection()
    trainer: TrainerSection = TrainerSection()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    tiny_model: TinyModelConfig = TinyModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationSection = EvaluationSection()
    samples: SamplesSection = SamplesSection()
    wandb: WandbSection = WandbSection()

    @property
    def training_tasks(self) -> list[str]:
        return list(training(self.tasks))

    @property
    def held_out_tasks(self) -> list[str]:
        return [name for name, task in self.tasks.items() if task.eval_of is not None]

    @property
    def model_folder(self) -> Path:
        """Return the folder of the model that the run starts with.

        Raises HubError where it is on the Hub, and not in the cache.
        """
        if found := model_repository(self.policy):
            return found.folder()
        return self.policy.model or self.run.folder / "model"

    @property
    def column_weights(self) -> dict[str, dict[str, float]]:
        """Return the weights of attached judges' columns in the loss, by task."""
        return {
            name: {
                key: weight
                for each in task.attached.values()
                for key, weight in each.weights.items()
            }
            for name, task in self.tasks.items()
        }

    @property
    def untruncated_tasks(self) -> list[str]:
        """Return the tasks whose tokens must be sampled from the model's whole distribution."""
        return [] if self.learner.allow_truncated_sampling else self.training_tasks

    @property
    def train_roles(self) -> dict[str, list[str]]:
        """Return the roles that training tasks train, of those that name them."""
        found = {name: self.tasks[name].train_roles for name in self.training_tasks}
        return {name: roles for name, roles in found.items() if roles}

    @property
    def worker_gpus(self) -> int:
        """Return the number of GPUs that sample, as far as the config says."""
        return len(self.launch.worker_gpus or [0])

    def problems(self) -> Iterator[str]:
        return rule_violations(self)

    def warnings(self) -> list[str]:
        """Return warnings about settings that have no effect, or waste work."""
        tasks = [warning for name in self.training_tasks for warning in self._task_warnings(name)]
        limits = (
            ("[policy] sync_weights_interval", self.policy.sync_weights_interval,
             "the workers never get trained weights"),
            ("[evaluation] every_steps", self.evaluation.every_steps or 0,
             "only the first and the last weights are evaluated"),
            ("[learner] warmup_steps", self.learner.warmup_steps,
             "the learning rate never reaches learning_rate"),
            ("[learner] decay_steps", self.learner.decay_steps or 0,
             "the learning rate never reaches final_rate"),
        )  # fmt: skip
        steps = self.plan.steps
        late = [
            f"{key} = {given} is more than the {steps} steps of the run: {effect}"
            for key, given, effect in limits
            if given > steps
        ]
        found = [*tasks, *late]
        for section in self.attached.values():
            found += section.warnings()
        is_written = "wandb" in self.trainer.writers or self.trainer.loop is not None
        if self.wandb != WandbSection() and not is_written:
            found.append('[wandb] cannot act: set [trainer] writers = ["wandb"]')
        return found

    def _task_warnings(self, name: str) -> Iterator[str]:
        task, strategy = self.tasks[name], self.strategy_of(name)
        aborts = self.policy.pause_mode == "abort"
        oldest = staleness(self.policy, task)
        ahead = self.policy.max_ahead if task.max_ahead is None else task.max_ahead
        has = f"task {name} has max_staleness = {oldest}"
        if oldest and strategy.kind == "sync" and self._is_set(task, "max_staleness"):
            yield f"{has}, which cannot act with [strategy] kind = sync: set kind = async, or 0"
        elif oldest and aborts and not (strategy.kind == "sync" or strategy.enable_partial_rollout):
            yield (
                f"{has}, but [policy] pause_mode = abort throws the tokens of unfinished rollouts "
                "away: set [strategy] enable_partial_rollout = true, or pause_mode = keep"
            )
        if ahead > oldest and self._is_set(task, "max_ahead"):
            yield f"task {name} has max_ahead = {ahead}, more than max_staleness = {oldest}"
        if strategy.over_sample_threshold and not oldest and strategy.on_straggler == "wait":
            yield (
                f"task {name} has over_sample_threshold = {strategy.over_sample_threshold:g}, "
                "which saves no time at max_staleness = 0: the trainer waits for every group that "
                'runs; set on_straggler = "drop", which favours short responses'
            )
        is_set = "on_straggler" in strategy.model_fields_set
        if aborts and is_set and strategy.on_straggler == "wait":
            yield (
                f'task {name} has on_straggler = "wait", but [policy] pause_mode = abort '
                "interrupts stragglers at every weight update: set pause_mode = keep"
            )

    def _is_set(self, task: TaskSection, field: str) -> bool:
        return getattr(task, field) is not None or field in self.policy.model_fields_set

    def context_problem(self, max_model_len: int | None, tasks: Iterable[str]) -> str:
        """Return which of `tasks` may ask for more tokens than the engine's context; "" for none.

        `max_model_len`: None where it is not known.
        """
        return next(context_problems(self, max_model_len, tasks), "")

    def memory_problem(self, budget: int) -> str:
        """Return why a run cannot be held to `budget` bytes (0: no limit); "" where it can."""
        return next(memory_problem(self, budget), "") if budget else ""

    # -- what is derived from it ---------------------------------------------

    def evaluation_size(self, task: str) -> int:
        """Return the number of problems of one evaluation of `task`.

        Raises ConfigError where they cannot be counted.
        """
        dataset = self.tasks[task].dataset
        size = self.evaluation.groups or dataset.count_held_out()
        if size is None:
            raise ConfigError(
                f"task {task}: problems of a data set of kind {dataset.kind} cannot be counted",
                hint="set [evaluation] groups to the number of its problems",
            )
        if size > MOST_PROBLEMS:
            raise ConfigError(too_many_problems(task, size))
        return size

    def leaves_out_failed(self, task: str) -> bool:
        return self.tasks[task].failed_problems == "left_out"

    def strategy_of(self, task: str) -> StrategySection:
        """Return [strategy] with the values that a task sets itself.

        An evaluation task has the strategy of its training task.
        """
        return self.strategy.overridden(self.tasks[task].strategy)

    def limits(self, maxmemory_bytes: int = 0) -> RunLimits:
        """Return what goes into the run's meta, for all processes to agree on.

        `maxmemory_bytes`: of the server; 0 = none.
        """
        budget = self.memory.budget(maxmemory_bytes)
        return RunLimits(
            **self.strategy.model_dump(include=set(TaskSettings.model_fields)),
            **self.lease.model_dump(),
            role_timeout_ms=self.lease.lease_ms,
            stale_threshold=self.policy.stale_threshold,
            ahead_threshold=self.policy.ahead_threshold,
            token_threshold=self.policy.token_threshold,
            sync_weights_interval=self.policy.sync_weights_interval,
            steps=self.plan.steps,
            batch_size=self.plan.batch_size,
            order=self.policy.order,
            retain_batches=self.retention.batches,
            retain_until_exported=self.retention.policy in ("export", "archive"),
            archive=self._archive(),
            columns=str(self.run.columns.resolve()) if self.run.columns else "",
            wait_replicas=self.redis.wait_replicas,
            compression=self.memory.compression,
            low_bytes=int(budget * self.memory.low_water),
            high_bytes=int(budget * self.memory.high_water),
            tasks={name: self._task_limits(name) for name in self.tasks},
        )

    def _archive(self) -> str:
        if self.retention.policy != "archive":
            return ""
        if not (place := self.retention.folder):
            return str((self.run.folder / "archive").resolve())
        # other runs may share it
        if "://" in place:
            return f"{place.rstrip('/')}/{self.run.name}"
        return str(Path(place).resolve() / self.run.name)

    def written(self) -> dict[str, str]:
        """Return what the file says, for settings that depend on more than one key or the server.

        As long as that is the same, a value of `rolloutmq set` holds
        (`buffer/run/settings.py`).
        """
        marks = {"low_bytes": self.memory.low_water, "high_bytes": self.memory.high_water}
        return {
            "concurrency": str(self.worker.concurrency),
            **{name: f"{mark} of {self.memory.budget_bytes}" for name, mark in marks.items()},
        }

    def _task_limits(self, name: str) -> TaskLimits:
        task = self.tasks[name]
        # only what the task sets itself: the rest follows the run's values when these change
        own = {} if task.strategy is None else task.strategy.own_numbers()
        interval = self.policy.sync_weights_interval
        if task.eval_of is None:
            for field, threshold in THRESHOLDS.items():
                if (publications := getattr(task, field)) is not None:
                    own[threshold] = stale_threshold(publications, interval)
        strategy = self.strategy_of(name).kind
        return TaskLimits(weight=task.weight, eval_of=task.eval_of, strategy=strategy, **own)
