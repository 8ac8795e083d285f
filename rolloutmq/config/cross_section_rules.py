"""Rules between the sections of a config.

A rule runs on a file in which other sections have mistakes, so that all mistakes are reported at
once: a rule that reads an invalid section ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from math import ceil
from typing import TYPE_CHECKING, Any

from buffer.config.memory_budget import MemoryNeed
from buffer.config.run_settings import PolicySection
from buffer.imports import is_dotted_path
from buffer.wire.staleness import stale_threshold
from consumer.config.learner import CriticConfig
from consumer.config.trainer import (
    MOST_PROBLEMS,
    PASS_AT,
    WITHIN_A_GROUP,
    EvaluationSection,
)
from producer_workers.agent_loops.agent_loop import BUILT_IN, has_agents
from producer_workers.config.engine import VllmConfig
from producer_workers.config.task import TaskSection, attached_kinds
from producer_workers.hub import is_id

if TYPE_CHECKING:
    from rolloutmq.config.config import Config

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
    for rule in _RULES:
        with suppress(SectionMissing):
            yield from rule(config)


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


def memory_problem(config: Config, budget: int = 0) -> Iterator[str]:
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


def context_problems(
    config: Config, max_model_len: int | None, tasks: Iterable[str]
) -> Iterator[str]:
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


def _evaluations_have_a_task(config: Config) -> Iterator[str]:
    known = training(config.tasks)
    for name, task in config.tasks.items():
        if task.eval_of is not None and task.eval_of not in known:
            yield (
                f'eval_of = "{task.eval_of}" of task {name} is not a training task; '
                f"known: {', '.join(known)}"
            )


def _revisions_have_a_repository(config: Config) -> Iterator[str]:
    if config.policy.revision and (config.policy.model is None or not is_id(config.policy.model)):
        yield (
            f"[policy] revision = {config.policy.revision} is for a model on the Hub: "
            f"{config.policy.model} is none"
        )


def _images_are_possible(config: Config) -> Iterator[str]:
    shown = [name for name, task in config.tasks.items() if task.images]
    if shown and config.run.media is None:
        yield f"the images of task {shown[0]} need a folder: set media in [run]"
    trained = [name for name in shown if name in training(config.tasks)]
    if trained and config.trainer.loop is None:
        yield (
            f"task {trained[0]} shows images, which the reference trainer cannot train on: "
            "set [trainer] loop to a trainer of your own"
        )


def _pauses_free_the_device(config: Config) -> Iterator[str]:
    if config.policy.pause_mode != "keep":
        return
    needs = "needs [policy] pause_mode abort or drain: keep"
    if config.trainer.flow == "colocated":
        yield f"[trainer] flow = colocated {needs} frees no memory"
    if config.evaluation.flow == "exclusive":
        yield f"[evaluation] flow = exclusive {needs} would freeze evaluations, too"


def _cache_has_a_fixed_size(config: Config) -> Iterator[str]:
    # vLLM ends with an error where free memory changes while it measures how much a cache may have
    is_measured = (
        config.engine.gpu_memory is not None and config.engine.gpu_memory.cache_bytes is None
    )
    if config.trainer.flow == "colocated" and is_measured:
        yield (
            "[trainer] flow = colocated needs [engine] kv_cache_memory_bytes: while vLLM measures "
            "the free memory of the GPU, the trainer must not use or free any"
        )


def _engine_loads_what_is_published(config: Config) -> Iterator[str]:
    lora = config.learner.lora
    if lora is None:
        # a trainer of the user's own may publish adapters
        if config.engine.wants_adapters and config.trainer.loop is None:
            yield (
                "[engine] loads adapters, but none are published: add [learner.lora], or leave "
                "out [engine] max_lora_rank or weights"
            )
    elif problem := config.engine.adapter_problem(lora.rank):
        yield problem


def _attached_judges_fit(config: Config) -> Iterator[str]:
    for kind in attached_kinds(config.tasks):
        yield from kind.rules(config)
    reference = config.learner.loss.kl_reference
    attached = [each for task in config.tasks.values() for each in task.attached.values()]
    if reference is not None and not any(reference in each.weights for each in attached):
        yield f"[learner.loss] kl_reference = {reference} is no teacher of a task"


def _columns_replace_rewards(config: Config) -> Iterator[str]:
    """Yield what would train nothing without rewards."""
    for name, task in config.tasks.items():
        if "none" in task.judges and task.eval_of is None and not task.attached:
            yield f"judge = none of task {name}: without a teacher, it teaches nothing"
    if config.trainer.loop is not None or config.trainer.advantages != "none":
        return
    objective = config.learner.loss.objective
    if config.learner.distillation is None and not is_dotted_path(objective):
        yield (
            "[trainer] advantages = none trains nothing without [learner.distillation], or an "
            "objective of yours"
        )
    for name, task in config.tasks.items():
        if task.eval_of is None and config.strategy_of(name).is_valid_sample_fn == "not_all_equal":
            yield (
                f"is_valid_sample_fn = not_all_equal of task {name} replaces groups by their "
                "rewards, which advantages = none does not read: leave it out"
            )


def _responses_fit_the_context(config: Config) -> Iterator[str]:
    # workers check it again with what their engine reports
    yield from context_problems(config, getattr(config.engine, "max_model_len", None), config.tasks)


def _tokens_are_younger_than_groups(config: Config) -> Iterator[str]:
    tokens = config.policy.max_token_staleness
    for name, task in training(config.tasks).items():
        groups = task.max_staleness
        if tokens is not None and groups is not None and tokens > groups:
            yield (
                f"[policy] max_token_staleness = {tokens} must be at most [tasks.{name}] "
                f"max_staleness = {groups}: a group expires with its oldest token"
            )


def _temperatures_agree(config: Config) -> Iterator[str]:
    # the trainer must compute the distribution that rollouts are sampled from
    if config.trainer.loop is not None:
        return
    for name, task in training(config.tasks).items():
        sampled = task.sample.temperature
        if sampled != config.learner.temperature:
            yield (
                f"task {name} is sampled with temperature {sampled:g}, [learner] temperature "
                f"is {config.learner.temperature:g}: both must be the same"
            )


def _distributions_are_whole(config: Config) -> Iterator[str]:
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


def _masks_are_bounded(config: Config) -> Iterator[str]:
    if not isinstance(config.engine, VllmConfig):
        return
    is_cut = any(task.sample.to_params().changes() for task in training(config.tasks).values())
    # vLLM records masks of all requests, or of none
    if not config.engine.sampling_mask and (config.learner.allow_truncated_sampling or not is_cut):
        return
    for name, task in config.tasks.items():
        if task.sample.temperature and not task.sample.to_params().always_cuts():
            yield (
                f"task {name} is sampled from the whole vocabulary, and vLLM then records the "
                "whole vocabulary for each of its tokens, as it records what top_p and the like "
                f"left of other tasks: set sample.top_k of task {name}, such as 1000"
            )


def _groups_can_be_compared(config: Config) -> Iterator[str]:
    advantages = config.trainer.advantages
    if config.trainer.loop is not None or advantages not in WITHIN_A_GROUP:
        return
    fewest, compares = 2, "the rollouts of a prompt"
    if advantages == "pass_at_k":
        fewest, compares = PASS_AT + 1, f"the sets of {PASS_AT} rollouts of a prompt"
    for name, task in training(config.tasks).items():
        if task.prompt_repeat_k < fewest:
            yield (
                f"prompt_repeat_k = {task.prompt_repeat_k} of task {name}: [trainer] advantages = "
                f"{advantages} compares {compares}, so every advantage would be 0; set "
                f"prompt_repeat_k to at least {fewest}, or advantages to reinforce_pp or gae"
            )


def _filters_keep_groups(config: Config) -> Iterator[str]:
    for name, task in training(config.tasks).items():
        if (
            task.prompt_repeat_k == 1
            and config.strategy_of(name).is_valid_sample_fn == "not_all_equal"
        ):
            yield (
                f"prompt_repeat_k = 1 of task {name}: is_valid_sample_fn = not_all_equal replaces "
                "every group of one rollout, so no batch would be made; leave it out"
            )


def _critic_is_used(config: Config) -> Iterator[str]:
    if (
        config.critic != CriticConfig()
        and config.trainer.loop is None
        and not config.trainer.is_gae
    ):
        yield (
            "[critic] is read with [trainer] advantages = gae only, not with "
            f"{config.trainer.advantages}"
        )


def _trained_roles_occur(config: Config) -> Iterator[str]:
    for name, task in config.tasks.items():
        loop = task.loop(config.worker.agent_loop)
        has_roles = loop not in BUILT_IN or has_agents(loop)
        if set(task.train_roles or ()) - {""} and not has_roles:
            yield (
                f"train_roles = {task.train_roles} of task {name}: agent_loop = {loop} gives no "
                "rollout a role; leave train_roles out"
            )


def _updates_have_groups(config: Config) -> Iterator[str]:
    if config.learner.updates_per_batch > config.plan.batch_size:
        yield (
            f"[learner] updates_per_batch = {config.learner.updates_per_batch} divides the groups "
            f"of a batch, and [plan] batch_size is {config.plan.batch_size}: some updates would "
            "have none"
        )


def _ranks_have_gpus(config: Config) -> Iterator[str]:
    gpus = config.launch.trainer_gpus or []
    ranks = config.launch.ranks(has_own_loop=config.trainer.loop is not None)
    if ranks > 1 and gpus and len(set(gpus)) != ranks:
        yield (
            f"[launch] trainer_gpus = {gpus} is not one GPU for each of {ranks} trainer_ranks; "
            "remove trainer_ranks, and there is one process for each GPU"
        )
    if config.trainer.loop is None and ranks == 1 and len(gpus) > 1:
        yield (
            f"[launch] trainer_gpus = {gpus}: trainer_ranks = 1 is one process, which uses one "
            "GPU, so the others would be idle; remove trainer_ranks"
        )
    if ranks > 1 and ":" in config.trainer.device:
        yield (
            f"[trainer] device = {config.trainer.device} is one GPU, and the trainer has {ranks} "
            'ranks; set device = "auto": each rank then has a GPU of its own'
        )


def _optimizer_fits_the_ranks(config: Config) -> Iterator[str]:
    ranks = config.launch.ranks(has_own_loop=config.trainer.loop is not None)
    if config.learner.optimizer == "adamw_8bit" and ranks > 1 and config.trainer.loop is None:
        yield (
            f"[learner] optimizer = adamw_8bit cannot update the sharded weights of {ranks} ranks; "
            "set optimizer = adamw, whose state is divided over the ranks, or trainer_ranks = 1"
        )


def _evaluations_are_asked_for(config: Config) -> Iterator[str]:
    default = EvaluationSection()
    if not config.held_out_tasks:
        for key, value in config.evaluation:
            if value != getattr(default, key):
                yield f"[evaluation] {key} cannot act: no task has eval_of, so nothing is evaluated"


def _evaluation_fits(config: Config) -> Iterator[str]:
    steps = config.evaluation.every_steps
    interval = config.policy.sync_weights_interval
    if steps is not None and steps % interval:
        yield (
            f"[evaluation] every_steps = {steps} must be a multiple of "
            f"[policy] sync_weights_interval = {interval}"
        )


def _workers_have_ports(config: Config) -> Iterator[str]:
    needed, gateway = config.launch.workers, config.gateway
    if gateway.port and gateway.ports < needed:
        yield f"[launch] workers = {needed} need [gateway] ports = {needed} or more, or port = 0"


def _evaluation_is_one_batch(config: Config) -> Iterator[str]:
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


_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _evaluations_have_a_task,
    _revisions_have_a_repository,
    _images_are_possible,
    memory_problem,
    _pauses_free_the_device,
    _cache_has_a_fixed_size,
    _engine_loads_what_is_published,
    _responses_fit_the_context,
    _tokens_are_younger_than_groups,
    _temperatures_agree,
    _distributions_are_whole,
    _masks_are_bounded,
    _groups_can_be_compared,
    _filters_keep_groups,
    _critic_is_used,
    _trained_roles_occur,
    _attached_judges_fit,
    _columns_replace_rewards,
    _updates_have_groups,
    _ranks_have_gpus,
    _optimizer_fits_the_ranks,
    _evaluations_are_asked_for,
    _evaluation_fits,
    _evaluation_is_one_batch,
    _workers_have_ports,
)
