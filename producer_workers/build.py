"""Build a producer or a worker from a config; the one file that knows all of their parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from buffer.errors import ConfigError
from buffer.groups.verdicts import Verdicts
from buffer.imports import load_function
from buffer.redis.store import Store
from buffer.run.origin import Origin
from buffer.run.run import Run
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState
from producer_workers.agent_loops.agent_loop import commands_of, load_agent_loop
from producer_workers.agent_loops.tokenizer import TaskTokenizer, Tokenizer, load_tokenizer
from producer_workers.agent_loops.toolbox import tool_schemas
from producer_workers.config.dataset import ImagesSection
from producer_workers.config.engine import HttpConfig
from producer_workers.config.producing import ProducingConfig
from producer_workers.config.sandbox import is_url
from producer_workers.config.strategy import FILTERS
from producer_workers.config.task import NO_JUDGE, JudgingSection, TaskSection, attached_kinds
from producer_workers.datasets.dataset import Dataset
from producer_workers.datasets.image_records import ImagePrompts
from producer_workers.datasets.open import open_dataset
from producer_workers.engines import build_engine, started
from producer_workers.engines.base import (
    Engine,
    ReportsLoad,
    ShowsImages,
    context_length,
    structures,
)
from producer_workers.engines.model_folder import eos_ids
from producer_workers.images import ImageFolder
from producer_workers.judges.cached import CachedJudge
from producer_workers.judges.judge import Judge, judge_call
from producer_workers.judges.load import (
    HttpJudge,
    is_called_inline,
    load_for,
    load_judge,
    load_worker_judge,
    make_judge,
)
from producer_workers.judges.watched_judges import JudgeTimes, WatchedColumns, WatchedJudges
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import continue_call, strategies_of
from producer_workers.worker.task_runner import TaskRunner, load_sample_filter
from producer_workers.worker.worker import Worker

if TYPE_CHECKING:
    from producer_workers.engines.http.engine import HttpEngine


def problems_dir(config: ProducingConfig, task: str) -> Path:
    """Return the folder of a task's generated problems, which its evaluation shares."""
    return config.run.folder / "problems" / (config.tasks[task].eval_of or task)


def make_producer(config: ProducingConfig, run: Run, origin: Origin) -> Producer:
    """Return a producer with one sampler per task. Raises ConfigError, DatasetError, ModelError."""
    tokenizer = load_tokenizer(str(config.model_folder))
    samplers = {}
    should_continue = {}
    for name in config.tasks:
        if name not in run.limits.tasks:
            hint = "start the trainer with this config first: it adds the task"
            raise ConfigError(f"task {name!r} is not in the run", hint=hint)
        rule = config.strategy_of(name).should_continue_fn
        if rule:
            function = load_function(rule, kind="should_continue_fn")
            should_continue[name] = continue_call(rule, function)
        seed = config.run.seed
        section = config.tasks[name]
        rows = open_dataset(section.dataset, problems_dir(config, name), section.split, seed=seed)
        images = None
        if section.images:
            images = ImagePrompts(
                str(config.model_folder),
                section.images,
                ImageFolder(config.run.folder, section.images),
                section.chat_template_kwargs,
            )
        samplers[name] = task_sampler(config, name, rows, tokenizer, images)
    return Producer(
        run,
        samplers,
        strategies_of(run.limits, should_continue),
        slice_size=config.producer.slice_size,
        origin=origin,
    )


def task_sampler(
    config: ProducingConfig,
    name: str,
    dataset: Dataset,
    tokenizer: Tokenizer,
    images: ImagePrompts | None = None,
) -> Sampler:
    """Return the sampler that turns a data set's rows into prompts. Raises ConfigError."""
    task = config.tasks[name]
    tools = [task.agent_loop_options.get(kind, ()) for kind in ("tools", "mcp")]
    return Sampler(
        name,
        dataset,
        task_tokenizer(tokenizer, task),
        task.sample.to_params(),
        prompt_repeat_k=task.prompt_repeat_k,
        seed=config.run.seed,
        shuffle=task.shuffle,
        max_prompt_tokens=config.producer.max_prompt_tokens,
        tools=tool_schemas(*tools),
        images=images,
        system_prompt=task.system_prompt,
        judge=task.judge,
    )


def task_tokenizer(tokenizer: Tokenizer, task: TaskSection) -> Tokenizer:
    if not task.chat_template_kwargs and task.system_prompt is None:
        return tokenizer
    return TaskTokenizer(tokenizer, task.chat_template_kwargs, task.system_prompt)


async def start_engine(config: ProducingConfig, run: Run) -> Engine:
    """Return the engine of a worker. Raises ConfigError, ModelError."""
    section = config.engine
    if config.worker.concurrency == "auto":
        section = section.reporting_load()
    is_changed = (
        config.tasks[name].sample.to_params().changes() for name in config.untruncated_tasks
    )
    if any(is_changed):
        section = section.recording_masks()
    engine = build_engine(section, config.model_folder, FIRST_WEIGHTS)
    if isinstance(section, HttpConfig) and section.limit:
        cast("HttpEngine", engine).turns = section.limit.turns(run, "engine", section.url)
    if isinstance(engine, ShowsImages):
        engine.images.read_from(image_folder(config))
    return await started(engine, config.worker.start_timeout_s)


def make_worker(
    config: ProducingConfig,
    run: Run,
    engine: Engine,
    worker_id: str,
    *,
    restarts: int = 0,
    command: str = "worker",
) -> Worker:
    """Return a worker; `restarts` counts its earlier engines. Raises ConfigError.

    `command`: it serves the tasks whose loops name this command.
    """
    if config.worker.concurrency == "auto" and not isinstance(engine, ReportsLoad):
        hint = "give [worker] concurrency a number"
        raise ConfigError(f"the engine {engine.name} does not report its load", hint=hint)
    names = task_names(config, command)
    check_images(config, names, engine)
    for name in names:  # responses without the structure would only look like a bad model
        if config.tasks[name].sample.structured and not structures(engine):
            raise ConfigError(
                f"the engine {engine.name} cannot generate structured output "
                f"(sample.structured of task {name!r})",
                hint="use [engine] kind vllm, or http with a server that has `structured_outputs`",
            )
    if problem := config.context_problem(context_length(engine), names):
        raise ConfigError(problem)
    tokenizer = load_tokenizer(str(config.model_folder))
    ends = eos_ids(config.model_folder)
    judges = WatchedJudges(JudgeTimes(run.observers))
    columns = column_judges(config, names, judges)
    tasks = {
        name: _make_runner(config, run, names, name, tokenizer, ends, judges, columns[name])
        for name in names
    }
    url = config.weights.url_of(config.run)
    worker = Worker(run, engine, tasks, config.worker, worker_id=worker_id, weights_url=url)
    worker.facts["engine_restarts"] = str(restarts)
    return worker


def task_names(config: ProducingConfig, command: str) -> list[str]:
    """Return the tasks of a worker, or of another command that serves some. Raises ConfigError."""
    commands = commands_of(config.tasks, config.worker.agent_loop)
    names = [name for name, found in commands.items() if found == command]
    if command == "worker":
        names = config.worker.tasks or names
    if not names:
        found = ", ".join(f"{name} by `rolloutmq {each}`" for name, each in commands.items())
        raise ConfigError("no task is for this process", hint=f"their agent loops serve {found}")
    if unknown := sorted(set(names) - set(config.tasks)):
        known = ", ".join(config.tasks)
        message = f"[worker] tasks: there is no task {', '.join(unknown)}"
        raise ConfigError(message, hint=f"known: {known}")
    for name in names:
        if commands[name] != command:
            message = f"[worker] tasks: {name} is served by `rolloutmq {commands[name]}`"
            raise ConfigError(message, hint="leave it out")
    return names


def check_images(config: ProducingConfig, names: Sequence[str], engine: Engine) -> None:
    """Raise ConfigError if a task has images that the engine cannot show to its model."""
    for name in names:
        if config.tasks[name].images and not isinstance(engine, ShowsImages):
            hint = "use [engine] kind vllm, or leave the task out of [worker] tasks"
            raise ConfigError(
                f"the engine {engine.name} cannot show the images of task {name!r}", hint=hint
            )


def image_folder(config: ProducingConfig) -> ImageFolder:
    """Return the images of the run; it reads every image that one of the tasks permits."""
    given = [task.images for task in config.tasks.values() if task.images] or [ImagesSection()]
    limits = ImagesSection(
        max_bytes=max(section.max_bytes for section in given),
        max_pixels=max(section.max_pixels for section in given),
    )
    return ImageFolder(config.run.folder, limits)


def _make_runner(
    config: ProducingConfig,
    run: Run,
    names: Sequence[str],
    name: str,
    tokenizer: Tokenizer,
    eos_ids: set[int],
    judges: WatchedJudges,
    column_judges: Sequence[WatchedColumns],
) -> TaskRunner:
    task = config.tasks[name]
    strategy = config.strategy_of(name)
    is_partial = strategy.enable_partial_rollout
    name_of_loop = task.loop(config.worker.agent_loop)
    loop = load_agent_loop(
        name_of_loop,
        judge=_make_judge(config, run, name, judges),
        tokenizer=task_tokenizer(tokenizer, task),
        eos_ids=eos_ids,
        partial_rollout=is_partial,
        options=task.loop_options(name_of_loop),
        worker=(config, run, names),
    )
    # an evaluation counts every problem, also those that are not worth training on
    spec = None if task.eval_of else strategy.is_valid_sample_fn
    return TaskRunner(
        loop,
        is_partial,
        _make_filter(spec, task.judging, judges) if spec else None,
        strategy.group_time_limit_s,
        "drop" if task.eval_of else strategy.on_failed_member,
        task.train_roles,
        column_judges,
        name in config.untruncated_tasks,
        judges,
    )


def column_judges(
    config: ProducingConfig, names: Sequence[str], judges: WatchedJudges
) -> dict[str, list[WatchedColumns]]:
    """Return the attached judges of each task, watched."""
    found: dict[str, list[WatchedColumns]] = {name: [] for name in names}
    for kind in attached_kinds(config.tasks):
        for name, judge in kind.judges(config, names).items():
            grace_s = config.tasks[name].judging.grace_s
            found[name].append(judges.watch_columns(judge, grace_s))
    return found


def _make_filter(
    spec: str, judging: JudgingSection, judges: WatchedJudges
) -> Callable[[Sequence[RolloutState]], Awaitable[bool]]:
    what = f"is_valid_sample_fn {spec!r}"
    function = load_sample_filter(spec)
    path = None if is_called_inline(function, judging, is_safe=spec in FILTERS) else spec
    call = judge_call(what, what, function, "filter", judging, path=path)
    return judges.watch_filter(what, call, judging.grace_s)


def _make_judge(
    config: ProducingConfig, run: Run, name: str, judges: WatchedJudges
) -> Judge | None:
    """Return the judge of a task; None if its environment or agent gives the reward."""
    task = config.tasks[name]
    if task.judge == NO_JUDGE:
        return None

    def watched(judge: Judge, spec: str) -> Judge:
        if limit := task.judging.limit:
            service = getattr(task.attached.get(spec), "url", spec)
            judge = judge.under(limit.turns(run, name, service if is_url(service) else name))
        cache = task.judging.cache
        bounds = (cache.max_entries, cache.max_mb << 20) if cache else ()
        judge.verdicts = Verdicts(run.context, name, *bounds)
        if cache and not judge.counts_use:
            judge = CachedJudge(judge, judge.verdicts)
        return judges.watch(judge, task.judging.grace_s)

    if not task.judging.is_elsewhere:
        return make_judge(
            task.judge, lambda spec: watched(load_for(task, spec, load_worker_judge), spec)
        )
    from producer_workers.judges.rq_judge import RqJudge
    from producer_workers.judges.rq_worker import judge_url

    url = judge_url(config.judges.redis_url, run.store.servers)
    store = Store(url, name="rolloutmq-judge", deadline_s=config.redis.deadline_s)

    def ask(judge: str) -> Judge:
        # loaded here too: a mistake is reported at the start, and a service is called from here
        asked = load_for(task, judge, load_judge)
        if not isinstance(asked, HttpJudge) and judge not in task.attached:
            sees_group = asked.sees_group
            asked = RqJudge(judge, store, config.run.name, task.judging, sees_group=sees_group)
        return watched(asked, judge)

    return make_judge(task.judge, ask)
