"""A whole config file: every section, what they demand of each other, and the limits of the run."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from pydantic import model_validator

from buffer.config.engine import EngineConfig, HttpConfig, VllmConfig
from buffer.config.learner import CriticConfig, LearnerConfig
from buffer.config.memory_budget import (
    MemoryNeed,
    MemorySection,
    RetentionSection,
    estimate_group_bytes,
)
from buffer.config.run_settings import (
    LaunchSection,
    LeaseSection,
    PlanSection,
    PolicySection,
    RedisSection,
    RunSection,
)
from buffer.config.section import Section
from buffer.config.strategy import StrategySection
from buffer.config.task import Tasks
from buffer.config.trainer import EvaluationSection, TrainerSection
from buffer.config.warm_start import TinyModelConfig, WarmStartConfig
from buffer.config.worker import JudgesSection, ProducerSection, WorkerSection
from buffer.errors import ConfigError
from buffer.model.limits import RunLimits, TaskLimits, TaskSettings
from buffer.model.staleness import stale_threshold


class Config(Section):
    """Every section of a config file, read and checked as a whole by every process of a run.

    Usage:

        config = load_config(Config, Path("configs/demo.toml"), ["run.name=mine"])
    """

    run: RunSection
    redis: RedisSection = RedisSection()
    lease: LeaseSection = LeaseSection()
    policy: PolicySection = PolicySection()
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

    @property
    def training_tasks(self) -> list[str]:
        """Return the names of the tasks that are trained on."""
        return [name for name, task in self.tasks.items() if task.eval_of is None]

    # -- what the sections demand of each other ------------------------------

    @model_validator(mode="after")
    def _some_task_trains(self) -> Config:
        if not any(self.tasks[name].weight > 0 for name in self.training_tasks):
            raise ValueError("no training task has a weight above 0: there is nothing to train on")
        return self

    @model_validator(mode="after")
    def _images_are_possible(self) -> Config:
        shown = [name for name, task in self.tasks.items() if task.images]
        if shown and self.run.media is None:
            raise ValueError(f"the images of task {shown[0]} need a folder: set media in [run]")
        trained = [name for name in shown if name in self.training_tasks]
        if trained and self.trainer.loop is None:
            raise ValueError(
                f"task {trained[0]} shows images, which the reference trainer cannot train on: "
                "set [trainer] loop to a trainer of your own"
            )
        return self

    @model_validator(mode="after")
    def _memory_is_enough(self) -> Config:
        if self.memory.budget_bytes:
            problem = self.memory_problem(self.memory.budget_bytes)
            if problem:
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _pauses_free_the_device(self) -> Config:
        if self.policy.pause_mode != "keep":
            return self
        needs = "needs [policy] pause_mode abort or drain: keep"
        if self.trainer.flow == "colocated":
            raise ValueError(f"[trainer] flow = colocated {needs} frees no memory")
        if self.evaluation.flow == "exclusive":
            raise ValueError(f"[evaluation] flow = exclusive {needs} would freeze evaluations, too")
        return self

    @model_validator(mode="after")
    def _engine_loads_what_is_published(self) -> Config:
        lora = self.learner.lora
        if lora is None:
            # a trainer of the user's own may publish adapters
            if self.engine.wants_adapters and self.trainer.loop is None:
                raise ValueError(
                    "[engine] loads adapters, but none are published: add [learner.lora], or leave "
                    "out [engine] max_lora_rank or weights"
                )
        elif isinstance(self.engine, VllmConfig) and (self.engine.max_lora_rank or 0) < lora.rank:
            raise ValueError(
                f"[learner.lora] rank = {lora.rank} needs [engine] max_lora_rank of at least that"
            )
        elif isinstance(self.engine, HttpConfig) and not self.engine.wants_adapters:
            raise ValueError('[learner.lora] needs [engine] weights = "adapters"')
        return self

    @model_validator(mode="after")
    def _temperatures_agree(self) -> Config:
        # the trainer must compute the distribution that rollouts are sampled from
        if self.trainer.loop is not None:
            return self
        for name in self.training_tasks:
            sampled = self.tasks[name].sample.temperature
            if sampled != self.learner.temperature:
                raise ValueError(
                    f"task {name} is sampled with temperature {sampled:g}, [learner] temperature "
                    f"is {self.learner.temperature:g}: both must be the same"
                )
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> Config:
        steps = self.evaluation.every_steps
        interval = self.policy.sync_weights_interval
        if steps is not None and steps % interval:
            raise ValueError(
                f"[evaluation] every_steps = {steps} must be a multiple of "
                f"[policy] sync_weights_interval = {interval}"
            )
        return self

    @model_validator(mode="after")
    def _responses_fit_the_context(self) -> Config:
        # workers check it again with what their engine reports
        problem = self.context_problem(getattr(self.engine, "max_model_len", None), self.tasks)
        if problem:
            raise ValueError(problem)
        return self

    def context_problem(self, max_model_len: int | None, tasks: Iterable[str]) -> str:
        """Return which of `tasks` may ask for more tokens than the engine's context; "" for none.

        `max_model_len`: None where it is not known.
        """
        if max_model_len is None:
            return ""
        prompt = self.producer.max_prompt_tokens
        for name in tasks:
            # an agent's requests have prompts of their own, and share max_tokens
            if (self.tasks[name].agent_loop or self.worker.agent_loop) == "gateway":
                continue
            sample = self.tasks[name].sample
            # nobody asked for the default: responses end where the context does
            if prompt is None and "max_tokens" not in sample.model_fields_set:
                continue
            response = sample.max_tokens
            if (prompt or 1) + response > max_model_len:
                asked = f"sample.max_tokens = {response}"
                asked += f" and [producer] max_prompt_tokens = {prompt}" if prompt else ""
                return (
                    f"task {name}: prompt and response share the engine's context of "
                    f"{max_model_len} tokens (max_model_len), which is too small for {asked}: "
                    "lower these, or raise [engine] max_model_len up to what the model can read"
                )
        return ""

    @model_validator(mode="after")
    def _tokens_are_younger_than_groups(self) -> Config:
        tokens = self.policy.max_token_staleness
        for name in self.training_tasks:
            groups = self.tasks[name].max_staleness
            if tokens is not None and groups is not None and tokens > groups:
                raise ValueError(
                    f"[policy] max_token_staleness = {tokens} must be at most [tasks.{name}] "
                    f"max_staleness = {groups}: a group expires with its oldest token"
                )
        return self

    # -- memory (I12) --------------------------------------------------------

    def memory_problem(self, budget: int) -> str:
        """Return why a run cannot be held to `budget` bytes (0: no limit); "" where it can."""
        return self._memory_need().problem(self.memory, budget)

    def _memory_need(self) -> MemoryNeed:
        prompt_tokens = self.producer.max_prompt_tokens
        tasks = [self.tasks[name] for name in self.training_tasks]
        largest = max(
            estimate_group_bytes(task.prompt_repeat_k, task.sample.max_tokens, prompt_tokens)
            for task in tasks
        )
        # a commit frees what is older than the oldest checkpoint that is kept
        kept = self.trainer.checkpoint_every_steps * self.trainer.keep_checkpoints
        threshold = max(self._stale_threshold(name) for name in self.training_tasks)
        ahead = threshold + self.strategy.over_sample_threshold
        return MemoryNeed(
            group_bytes=self.memory.group_bytes or largest,
            batches=kept + self.retention.batches,
            batch_size=self.plan.batch_size,
            in_flight=ceil(ahead * self.plan.batch_size),
        )

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
        return size

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
            lease_ms=self.lease.lease_ms,
            heartbeat_ms=self.lease.heartbeat_ms,
            worker_timeout_ms=self.lease.worker_timeout_ms,
            role_timeout_ms=self.lease.lease_ms,
            max_tries=self.lease.max_tries,
            pause_timeout_s=self.lease.pause_timeout_s,
            stale_threshold=self.policy.stale_threshold,
            token_threshold=self.policy.token_threshold,
            sync_weights_interval=self.policy.sync_weights_interval,
            steps=self.plan.steps,
            batch_size=self.plan.batch_size,
            order=self.policy.order,
            retain_batches=self.retention.batches,
            retain_until_exported=self.retention.policy == "export",
            media=str(self.run.media.resolve()) if self.run.media else "",
            wait_replicas=self.redis.wait_replicas,
            compression=self.memory.compression,
            low_bytes=int(budget * self.memory.low_water),
            high_bytes=int(budget * self.memory.high_water),
            tasks={name: self._task_limits(name) for name in self.tasks},
        )

    def _task_limits(self, name: str) -> TaskLimits:
        task = self.tasks[name]
        # only what the task sets itself: the rest follows the run's values when these change
        own = {} if task.strategy is None else task.strategy.own_numbers()
        if task.eval_of is None and task.max_staleness is not None:
            own["stale_threshold"] = self._stale_threshold(name)
        strategy = self.strategy_of(name).kind
        return TaskLimits(weight=task.weight, eval_of=task.eval_of, strategy=strategy, **own)

    def _stale_threshold(self, task: str) -> int:
        own = self.tasks[task].max_staleness
        publications = self.policy.max_staleness if own is None else own
        return stale_threshold(publications, self.policy.sync_weights_interval)


# former names, from when each side read its own part of a file
ConfigFile = Config
TrainingConfig = Config
ProducingConfig = Config
