"""Rules between the sections of a config.

A rule runs on a file in which other sections have mistakes, so that all mistakes are reported at
once: a rule that reads an invalid section ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from math import ceil
from typing import Any, NamedTuple

from buffer.config.memory_budget import MemoryNeed
from buffer.config.run_settings import PolicySection
from buffer.imports import is_dotted_path
from buffer.wire.staleness import stale_threshold
from consumer.config.critic import CriticConfig
from consumer.config.trainer import MOST_PROBLEMS, PASS_AT, WITHIN_A_GROUP, TrainerSection
from producer_workers.agent_loops.agent_loop import BUILT_IN, has_agents
from producer_workers.config.task import TaskSection, attached_kinds
from producer_workers.hub import is_id

TaskSections = Mapping[str, TaskSection]


class SectionMissing(Exception):
    """A rule reads a section that the file does not have, or not without a mistake."""


class Sections:
    """Those sections of a config that are valid, as attributes."""

    def __init__(self, valid: Mapping[str, Any]) -> None:
        self._valid = valid

    def __getattr__(self, name: str) -> Any:
        if name not in self._valid:
            raise SectionMissing(name)
        return self._valid[name]


def rule_violations(config: Any) -> Iterator[str]:
    """Yield violations of the rules between the sections of a Config, or of Sections."""
    for is_broken, what, hint in RULES:
        with suppress(SectionMissing):
            if is_broken(config):
                yield f"{what}: {hint}".format(c=config)
    for rules, of in ((RULES_OF_TASKS, dict), (RULES_OF_TRAINING, training)):
        for is_broken, what, hint in rules:
            with suppress(SectionMissing):
                known = ", ".join(training(config.tasks))
                for name, task in of(config.tasks).items():
                    if is_broken(config, task, name):
                        yield f"{what}: {hint}".format(c=config, t=task, name=name, known=known)
    for function in _FUNCTIONS:
        with suppress(SectionMissing):
            yield from function(config)


def training(tasks: TaskSections) -> dict[str, TaskSection]:
    """Return the tasks that are trained on."""
    return {name: task for name, task in tasks.items() if task.eval_of is None}


def staleness(policy: PolicySection, task: TaskSection) -> int:
    """Return the limit of a task, in publications."""
    return policy.max_staleness if task.max_staleness is None else task.max_staleness


def ahead(policy: PolicySection, task: TaskSection) -> int:
    """Return how many publications ahead groups of a task are started."""
    own = policy.max_ahead if task.max_ahead is None else task.max_ahead
    return min(own, staleness(policy, task))


def memory_problem(config: Any, budget: int = 0) -> Iterator[str]:
    """Yield why a run cannot be held to `budget` bytes (I12); 0: the budget of the config."""
    sizes = [
        task.group_bytes(config.producer.max_prompt_tokens)
        for task in training(config.tasks).values()
    ]
    # a commit frees what is older than the oldest checkpoint that is kept
    kept = config.trainer.checkpoint_every_steps * config.trainer.keep_checkpoints
    most = max((ahead(config.policy, task) for task in training(config.tasks).values()), default=0)
    steps = stale_threshold(most, config.policy.sync_weights_interval)
    batches = steps + config.strategy.over_sample_threshold
    need = MemoryNeed(
        group_bytes=config.memory.group_bytes or max(sizes, default=0),
        batches=kept + config.retention.batches,
        batch_size=config.plan.batch_size,
        in_flight=ceil(batches * config.plan.batch_size),
    )
    if problem := need.problem(config.memory, budget or config.memory.budget_bytes or 0):
        yield problem


def context_problems(config: Any, max_model_len: int | None, tasks: Iterable[str]) -> Iterator[str]:
    """Yield which of `tasks` may ask for more tokens than the engine's context.

    `max_model_len`: None where it is not known.
    """
    if max_model_len is None:
        return
    prompt = config.producer.max_prompt_tokens
    for name in tasks:
        task = config.tasks[name]
        # an agent's requests have prompts of their own, and share max_tokens
        if has_agents(task.loop(config.worker.agent_loop)):
            continue
        # the default limit is no wish of the user: responses then end where the context does
        if prompt is None and "max_tokens" not in task.sample.model_fields_set:
            continue
        response = task.sample.max_tokens
        if (prompt or 1) + response > max_model_len:
            asked = f"sample.max_tokens = {response}"
            asked += f" and [producer] max_prompt_tokens = {prompt}" if prompt else ""
            yield (
                f"task {name}: prompt and response share the engine's context of "
                f"{max_model_len} tokens (max_model_len), which is too small for {asked}: "
                "lower these, or raise [engine] max_model_len up to what the model can read"
            )


# -- the rules ------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A violation: its condition, what is wrong, and what to do.

    `c` is the config. A rule of tasks also has `t`, the section of a task, and its `name`.
    """

    is_broken: Callable[..., object]
    what: str
    hint: str


RULES = (
    Rule(lambda c: c.policy.revision and not (c.policy.model and is_id(c.policy.model)),
        "[policy] revision = {c.policy.revision} is for a model on the Hub",
        "{c.policy.model} is none"),
    Rule(lambda c: c.trainer.flow == "colocated" and c.policy.pause_mode == "keep",
        "[trainer] flow = colocated needs [policy] pause_mode abort or drain",
        "keep frees no memory"),
    Rule(lambda c: c.evaluation.flow == "exclusive" and c.policy.pause_mode == "keep",
        "[evaluation] flow = exclusive needs [policy] pause_mode abort or drain",
        "keep would freeze evaluations, too"),
    Rule(lambda c: c.critic != CriticConfig() and c.trainer.loop is None and not c.trainer.is_gae,
        "[critic] is read with [trainer] advantages = gae only, not with {c.trainer.advantages}",
        "leave it out"),
    Rule(lambda c: _reads_no_rewards(c.trainer) and c.learner.distillation is None and
            not is_dotted_path(c.learner.loss.objective),
        "[trainer] advantages = none trains nothing without [learner.distillation], or an "
        "objective of yours",
        "set one of them"),
    Rule(lambda c: c.learner.updates_per_batch > c.plan.batch_size,
        "[learner] updates_per_batch = {c.learner.updates_per_batch} divides the groups of a "
        "batch, and [plan] batch_size is {c.plan.batch_size}",
        "some updates would have none"),
    Rule(lambda c: _ranks(c) > 1 and len(set(c.launch.trainer_gpus or ())) not in (0, _ranks(c)),
        "[launch] trainer_gpus = {c.launch.trainer_gpus} is not one GPU for each trainer rank",
        "remove trainer_ranks, and there is one process for each GPU"),
    Rule(lambda c: _ranks(c) == 1 and not c.trainer.loop and len(c.launch.trainer_gpus or ()) > 1,
        "[launch] trainer_gpus = {c.launch.trainer_gpus}, and trainer_ranks = 1 uses one GPU",
        "remove trainer_ranks, since the others would be idle"),
    Rule(lambda c: _ranks(c) > 1 and ":" in c.trainer.device,
        "[trainer] device = {c.trainer.device} is one GPU, and the trainer has several ranks",
        'set device = "auto": each rank then has a GPU of its own'),
    Rule(lambda c: c.learner.optimizer == "adamw_8bit" and _ranks(c) > 1 and not c.trainer.loop,
        "[learner] optimizer = adamw_8bit cannot update weights that are sharded over ranks",
        "set optimizer = adamw, whose state is sharded, too, or trainer_ranks = 1"),
    Rule(lambda c: (c.evaluation.every_steps or 0) % c.policy.sync_weights_interval,
        "[evaluation] every_steps = {c.evaluation.every_steps} must be a multiple of [policy] "
        "sync_weights_interval = {c.policy.sync_weights_interval}",
        "evaluations need weights that are published"),
)  # fmt: skip

RULES_OF_TASKS = (
    Rule(lambda c, t, name: t.eval_of is not None and t.eval_of not in training(c.tasks),
        'eval_of = "{t.eval_of}" of task {name} is not a training task',
        "known: {known}"),
    Rule(lambda c, t, name: set(t.train_roles or ()) - {""} and not _has_roles(c, t),
        "train_roles = {t.train_roles} of task {name}, whose agent_loop gives no rollout a role",
        "leave train_roles out"),
)  # fmt: skip

RULES_OF_TRAINING = (
    Rule(lambda c, t, name: "none" in t.judges and not t.attached,
        "judge = none of task {name}", "without a teacher, it teaches nothing"),
    Rule(lambda c, t, name: _reads_no_rewards(c.trainer) and
            c.strategy_of(name).is_valid_sample_fn == "not_all_equal",
        "is_valid_sample_fn = not_all_equal of task {name} replaces groups by their rewards, which "
        "advantages = none does not read",
        "leave it out"),
    Rule(lambda c, t, name: t.images and c.trainer.loop is None,
        "task {name} shows images, which the reference trainer cannot train on",
        "set [trainer] loop to a trainer of your own"),
    Rule(lambda c, t, name: t.max_staleness is not None and
            (c.policy.max_token_staleness or 0) > t.max_staleness,
        "[policy] max_token_staleness = {c.policy.max_token_staleness} must be at most "
        "[tasks.{name}] max_staleness = {t.max_staleness}",
        "a group expires with its oldest token"),
    # the trainer must compute the distribution that rollouts are sampled from
    Rule(lambda c, t, name: not c.trainer.loop and t.sample.temperature != c.learner.temperature,
        "task {name} is sampled with temperature {t.sample.temperature:g}, [learner] temperature "
        "is {c.learner.temperature:g}",
        "both must be the same"),
    Rule(lambda c, t, name: not c.trainer.loop and t.prompt_repeat_k < _compared(c.trainer),
        "prompt_repeat_k = {t.prompt_repeat_k} of task {name}: [trainer] advantages = "
        "{c.trainer.advantages} compares rollouts, or sets of them, so every advantage would be 0",
        f"set it to 2 (pass_at_k: {PASS_AT + 1}) or more, or advantages to reinforce_pp"),
    Rule(lambda c, t, name: t.prompt_repeat_k == 1 and
            c.strategy_of(name).is_valid_sample_fn == "not_all_equal",
        "prompt_repeat_k = 1 of task {name}: is_valid_sample_fn = not_all_equal replaces every "
        "group of one rollout, so no batch would be made",
        "leave it out"),
)  # fmt: skip


def _ranks(config: Any) -> int:
    return int(config.launch.ranks(has_own_loop=config.trainer.loop is not None))


def _has_roles(config: Any, task: TaskSection) -> bool:
    loop = task.loop(config.worker.agent_loop)
    return loop not in BUILT_IN or has_agents(loop)


def _reads_no_rewards(trainer: TrainerSection) -> bool:
    return trainer.loop is None and trainer.advantages == "none"


def _compared(trainer: TrainerSection) -> int:
    """Return how many rollouts of a prompt are compared with one another at least."""
    if trainer.advantages == "pass_at_k":
        return PASS_AT + 1
    return 2 if trainer.advantages in WITHIN_A_GROUP else 1


def _kinds_fit(config: Any) -> Iterator[str]:
    for section in (config.engine, *config.attached.values()):
        yield from section.rules(config)
    for kind in attached_kinds(config.tasks):
        yield from kind.rules(config)
    reference = config.learner.loss.kl_reference
    attached = [each for task in config.tasks.values() for each in task.attached.values()]
    if reference is not None and not any(reference in each.weights for each in attached):
        yield f"[learner.loss] kl_reference = {reference} is no teacher of a task"


def _distributions_are_whole(config: Any) -> Iterator[str]:
    if config.learner.allow_truncated_sampling:
        return
    for name, task in training(config.tasks).items():
        params = task.sample.to_params()
        if changes := params.changes(masked=config.engine.has_masks):
            other = ", or use [engine] kind vllm or transformers, which record what it leaves"
            if params.changes(masked=True):
                other = ""
            yield (
                f"task {name} is sampled with {changes}: the engine's logprobs are then of another "
                "distribution than the trainer's, which covers all tokens, and the ratios between "
                f"the two are wrong; sample without it{other}, or set "
                "[learner] allow_truncated_sampling = true"
            )


def _evaluations_are_asked_for(config: Any) -> Iterator[str]:
    if not config.held_out_tasks:
        for key, value in config.evaluation:
            if value != config.evaluation.default_of(key):
                yield f"[evaluation] {key} cannot act: no task has eval_of, so nothing is evaluated"


def _evaluation_is_one_batch(config: Any) -> Iterator[str]:
    for name, task in config.tasks.items():
        if task.eval_of is None or config.evaluation.groups or not task.dataset.is_generated:
            continue
        size = task.dataset.count_held_out() or 0
        if size > MOST_PROBLEMS:
            yield too_many_problems(name, size)


def too_many_problems(task: str, problems: int) -> str:
    """Return the message for an evaluation with too many problems."""
    return (
        f"task {task} has {problems} problems, and an evaluation has at most {MOST_PROBLEMS}: "
        f"set [evaluation] groups = {MOST_PROBLEMS}, or reserve fewer"
    )


_FUNCTIONS: tuple[Callable[[Any], Iterator[str]], ...] = (
    memory_problem,
    # workers check it again with what their engine reports
    lambda c: context_problems(c, getattr(c.engine, "max_model_len", None), c.tasks),
    _distributions_are_whole,
    _kinds_fit,
    _evaluations_are_asked_for,
    _evaluation_is_one_batch,
)
"""Rules that need more than a condition and a message."""
