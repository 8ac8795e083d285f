"""[tasks.<name>]: the tasks of a run, how their responses are sampled, and what judges them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from buffer.config.attached import Attaching
from buffer.config.memory_budget import estimate_group_bytes
from buffer.config.run_settings import Name
from buffer.config.section import YEAR_S, Count, Section
from buffer.imports import attached, is_dotted_path, load_object
from buffer.readable import format_size
from buffer.wire.document import MAX_MEMBERS
from buffer.wire.framing import MAX_BYTES
from buffer.wire.sampling import SampleParams, StructuredOutput
from producer_workers.config.attached_judge import AttachedJudge
from producer_workers.config.call_limit import CacheSection, LimitSection
from producer_workers.config.dataset import DatasetSection, ImagesSection
from producer_workers.config.sandbox import BUBBLEWRAP, Sandbox, is_url
from producer_workers.config.strategy import StrategySection

HELD_OUT = "held_out"
"""The split of a training task's data set that its `eval_of` task reads."""


class NamedJudge(NamedTuple):
    """A judge that a config calls by a name of its own."""

    path: str
    """its function, as package.module:function"""
    meaning: str
    takes: str = ""
    """the function that reads a ground truth, and raises ValueError for one that no answer fits"""
    is_unsafe: bool = False
    """it may run forever, or runs what a model wrote: only allowed in a process of its own"""


OWNED_BY_PROMPTS = frozenset(
    {"conversation", "tools", "tokenize", "return_dict", "return_tensors", "chat_template"}
    | {"add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"}
)
"""Arguments of a chat template that decide what a prompt is."""

_FUNCTIONS = "producer_workers.judges.built_in"

RUNS_PROGRAMS = "python_tests"
"""The judge that runs what a model wrote, and whose ground truth is no answer: tests."""

_BUILT_IN = {
    "reasoning_gym": NamedJudge(f"{_FUNCTIONS}:reasoning_gym_score", "the package's own verifier"),
    "none": NamedJudge(f"{_FUNCTIONS}:no_score", "always 0, where teachers alone count"),
    "exact_match": NamedJudge(
        f"{_FUNCTIONS}:exact_match", "equal text", "producer_workers.judges.response_text:text_of"
    ),
    RUNS_PROGRAMS: NamedJudge(
        f"{_FUNCTIONS}:python_tests",
        "the tests that a program passes, in `judging.sandbox`",
        f"{_FUNCTIONS}:tests_of",
        is_unsafe=True,
    ),
}

NAMED_JUDGES = "rolloutmq.named_judges"
"""The group of entry points whose objects are a NamedJudge, by the name that a config gives."""


@cache
def named_judges() -> Mapping[str, NamedJudge]:
    """Return the judges that have a name. Raises ConfigError if one cannot be imported."""
    others = attached(NAMED_JUDGES)
    return _BUILT_IN | {name: load_object(spec, kind="judge") for name, spec in others.items()}


NO_JUDGE = "environment"
"""The name for no judge: the environment or the agent of a loop gives the reward."""

JudgeWeight = Annotated[float, Field(ge=-1e6, le=1e6)]
JudgeSpec = str | dict[str, str | dict[str, JudgeWeight]]
"""A judge; or judges by pattern of the data source, each one judge or several with weights."""


def judge_names(spec: JudgeSpec) -> list[str]:
    """Return the names of all judges in `spec`."""
    if isinstance(spec, str):
        return [spec]
    names: list[str] = []
    for judges in spec.values():
        names += [judges] if isinstance(judges, str) else judges
    return names


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class SampleParamsSection(Section):
    """[tasks.<name>.sample]: how responses are sampled."""

    temperature: float = Field(1.0, ge=0, le=100)
    """0 is greedy"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling; 1 turns it off"""
    top_k: Count = Field(0, ge=0)
    """sample only from the k most likely tokens; 0 turns it off"""
    min_p: float = Field(0.0, ge=0, le=1)
    """sample only from tokens with this share of the largest probability or more; 0 turns it off"""
    max_tokens: Count = Field(2048, ge=1)
    """largest number of tokens of a response"""
    min_tokens: Count = Field(0, ge=0)
    """smallest number of tokens of a response. Like top_p, top_k, min_p and structured, it cuts off
    tokens: see [learner] allow_truncated_sampling
    """
    stops: list[str] = Field(default_factory=list)
    """strings that end a response"""
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    """tokens that end a response"""
    seed: int | None = Field(None, ge=0, lt=2**32)
    """every rollout gets a seed of its own, derived from this one, the run's seed, the group and
    the index in it, so that the same weights sample the same response again; default: no seeds
    """
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    """above 1: tokens of the prompt and of the response so far become less likely; 1 turns it off.
    This and the other penalties need [learner] allow_truncated_sampling in a training task
    """
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """above 0: tokens of the response so far become less likely; 0 turns it off"""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """the same, in proportion to how often a token is there; 0 turns it off"""
    structured: StructuredOutput | None = None
    """form that a response is kept to while it is sampled: {choice = [...]}, {regex = "..."} or
    {json_schema = {...}}; only engines vllm and http; default: any text
    """

    def problems(self) -> Iterator[str]:
        """Yield a problem if the bounds of a length are in the wrong order."""
        if self.min_tokens > self.max_tokens:
            yield f"min_tokens = {self.min_tokens} must not exceed max_tokens = {self.max_tokens}"

    def to_params(self) -> SampleParams:
        """Return these settings as a rollout carries them."""
        return SampleParams(**dict(self))


class JudgingSection(Section):
    """[tasks.<name>.judging]: where the judge runs, and its limits.

    They also apply to a function of yours in `is_valid_sample_fn`, but kind rq. A judge at a URL is
    called from the rollout worker.
    """

    kind: Literal["auto", "inline", "process", "rq"] = "auto"
    """inline: in the rollout worker, for what is cheap and cannot hang. process: in processes of
    the rollout worker, which are killed if they hang or crash. rq: in a forked process of
    `rolloutmq judge`, for slow or unsafe judges, on other machines too. auto: inline for built-in
    judges that are safe there and for functions declared with @rolloutmq.runs_inline, else process
    """
    processes: int = Field(4, ge=1, le=1024)
    """kind process: largest number of processes of one judge in one worker, started when they are
    needed; each makes one call at a time, or 64 of a coroutine function
    """
    timeout_s: float = Field(60.0, gt=0, le=YEAR_S)
    """time after which a judge is killed, without the time that it waits for its turn; its group
    counts as a failed try
    """
    memory_mb: int = Field(4096, ge=256, le=1 << 24)
    """kinds process and rq: address space of the process that judges; Python raises MemoryError
    beyond it. One that uses a GPU needs some 100,000
    """
    retries: int = Field(2, ge=0, le=1000)
    """kind rq and judges at a URL: further attempts after a judge failed, was killed or was lost,
    before the rollout fails
    """
    sandbox: Sandbox = BUBBLEWRAP
    """where python_tests runs programs. bubblewrap: without files, network, environment and other
    processes; it must be installed. weak: with limits of time, memory and files only, so that a
    program may read what its user may. Or the URL of a service with SandboxFusion's form of HTTP
    """
    limit: LimitSection | None = None
    """quota of what the judge calls, for all workers together: { requests_per_minute, at_once, … };
    a call waits for its turn before its timeout_s begins; default: none
    """
    cache: CacheSection | None = None
    """ask the judge once about the same response to the same prompt: {} or { max_entries, max_mb };
    default: ask it each time
    """
    grace_s: float = Field(10.0, ge=0, le=YEAR_S)
    """time that a judge has to finish when an abort pause begins; then it is cancelled, and its
    rollout keeps its tokens and is judged when its group is claimed again
    """

    @property
    def is_elsewhere(self) -> bool:
        """Return whether `rolloutmq judge` calls the judge, and not the rollout worker."""
        return self.kind == "rq"


class TaskSection(Attaching):
    """[tasks.<name>]: one kind of problem; a run mixes its training tasks by weight.

    A key that a package attaches is an `AttachedJudge`.
    """

    attaches = "rolloutmq.judges"

    weight: float = Field(1.0, ge=0, le=1e6)
    """share of this task in a batch, relative to the others"""
    max_staleness: int | None = Field(None, ge=0, le=1_000_000)
    """how many publications old the weights of a rollout may be; default: [policy] max_staleness"""
    max_ahead: int | None = Field(None, ge=0, le=1_000_000)
    """how many publications ahead of the trainer groups are started; default: [policy] max_ahead"""
    prompt_repeat_k: int = Field(8, ge=1, le=MAX_MEMBERS)
    """rollouts per prompt: the size of a group"""
    sample: SampleParamsSection = SampleParamsSection()
    """how responses are sampled"""
    dataset: DatasetSection
    """source of the prompts"""
    judge: JudgeSpec
    """what scores a response: the name of a built-in judge, a function of yours as
    package.module:function, a URL, or environment (no judge: environment or agent give the reward);
    or a table of judges by data source, each entry one judge or several with weights
    """
    judging: JudgingSection = JudgingSection()
    """where the judge runs, and its limits"""
    eval_of: str | None = None
    """makes this an evaluation task: the training task whose held-out problems are answered once
    each, greedily; keys that are left out are taken from that task
    """
    failed_problems: Literal["wrong", "left_out"] = "wrong"
    """how an evaluation counts a problem of which every try failed: as wrong, or not at all; their
    number is shown beside the accuracy
    """
    shuffle: bool = True
    """shuffle the prompts anew in every epoch"""
    system_prompt: str | None = None
    """system message of every conversation of this task that has none of its own, an agent's
    included; default: as the data set, or the model's chat template, has it
    """
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """arguments of the model's chat template, for example enable_thinking = false for Qwen 3"""
    agent_loop: str | None = None
    """agent loop that generates the groups of this task; default: that of the kind of data set, or
    else [worker] agent_loop
    """
    agent_loop_options: dict[str, Any] = Field(default_factory=dict)
    """arguments of that loop, for example tools = ["my_tools:search"], max_turns = 4"""
    train_roles: list[str] | None = Field(None, min_length=1)
    """the roles that are trained, of agents that give the model several ("": the agent's own
    session); the rollouts of others have mask 0. Default: all
    """
    strategy: StrategySection | None = None
    """the keys of [strategy] with other values for this task"""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leave_own_arguments_alone(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(OWNED_BY_PROMPTS & kwargs.keys()):
            raise ValueError(f"{', '.join(taken)} cannot be set: prompts are made with their own")
        return kwargs

    @field_validator("judge")
    @classmethod
    def _check_judge(cls, judge: JudgeSpec) -> JudgeSpec:
        if judge == NO_JUDGE:
            return judge
        if not judge:
            raise ValueError("expected a judge, or at least one data source with its judge")
        if isinstance(judge, dict):
            for source, judges in judge.items():
                if isinstance(judges, dict) and not any(judges.values()):
                    raise ValueError(
                        f"data source {source!r} has no judge with a weight other than 0"
                    )
        others = attached(cls.attaches)
        for name in judge_names(judge):
            if name in named_judges() or name in others:
                continue
            if not is_dotted_path(name) and not is_url(name):
                known = ", ".join((*named_judges(), *others, NO_JUDGE))
                raise ValueError(
                    f"expected {known}, package.module:function or a URL, not {name!r}"
                )
        return judge

    def problems(self) -> Iterator[str]:
        named = named_judges()
        unsafe = [name for name in self.judges if name in named and named[name].is_unsafe]
        if unsafe and self.judging.kind == "inline":
            yield (
                f"judge {', '.join(unsafe)} needs a process of its own: "
                'set judging = { kind = "process" }'
            )
        for name in set(self.judges) & attached(self.attaches).keys():
            if not getattr(self.attached.get(name), "scored_by", ""):
                yield f"judge {name!r} needs its values: set {name} = {{ … }} in the task"
        if (size := self.group_bytes(None)) > MAX_BYTES:
            yield (
                f"prompt_repeat_k = {self.prompt_repeat_k} responses of sample.max_tokens = "
                f"{self.sample.max_tokens} tokens make groups of up to {format_size(size)}, and "
                f"no process reads more than {format_size(MAX_BYTES)}: reduce one of the two"
            )

    def group_bytes(self, prompt_tokens: int | None) -> int:
        """Return the bytes of a finished group whose responses are as long as they may be."""
        return estimate_group_bytes(self.prompt_repeat_k, self.sample.max_tokens, prompt_tokens)

    def loop(self, default: str) -> str:
        """Return the name of the agent loop; `default` is [worker] agent_loop."""
        return self.agent_loop or self.dataset.agent_loop or default

    def loop_options(self, loop: str) -> dict[str, Any]:
        """Return the arguments of this loop: those that the data set knows, and the task's."""
        keys = self.dataset.loop_keys if loop == self.dataset.agent_loop else ()
        return {key: getattr(self.dataset, key) for key in keys} | self.agent_loop_options

    @property
    def judges(self) -> list[str]:
        return [] if self.judge == NO_JUDGE else judge_names(self.judge)

    @property
    def images(self) -> ImagesSection | None:
        """Return the limits of images that rows may name; None for a task of texts."""
        return getattr(self.dataset, "images", None)

    @property
    def lane(self) -> Literal["fresh", "eval"]:
        return "eval" if self.eval_of else "fresh"

    @property
    def split(self) -> str | None:
        """Return the split of the data set to read; None is the training split."""
        return HELD_OUT if self.eval_of else None


def inherit_held_out(tasks: Any) -> Any:
    """Complete each `eval_of` task with the values of its training task, sampled once and greedily.

    One of an unknown training task is completed from any, so that it has no other mistakes than
    its own (`rolloutmq.config.cross_section_rules` refuses it).
    """
    if not isinstance(tasks, Mapping):
        return tasks
    training = {
        name: task
        for name, task in tasks.items()
        if isinstance(task, Mapping) and task.get("eval_of") is None
    }
    return {name: _inherit(task, training) for name, task in tasks.items()}


def _inherit(task: Any, training: Mapping[str, Mapping[str, Any]]) -> Any:
    if not isinstance(task, Mapping) or not isinstance(task.get("eval_of"), str):
        return task
    base = training.get(task["eval_of"]) or next(iter(training.values()), {})
    once = {"weight": 0.0, "prompt_repeat_k": 1, "shuffle": False}
    # what packages attach adds columns to what is trained
    kept = {*TaskSection.model_fields, str(base.get("judge"))}
    inherited = {key: value for key, value in base.items() if key in kept}
    merged = {**inherited, **once, **task}
    if all(isinstance(part.get("sample", {}), Mapping) for part in (base, task)):
        greedy = {"temperature": 0.0}
        merged["sample"] = {**base.get("sample", {}), **greedy, **task.get("sample", {})}
    return merged


def _some_task_trains(tasks: dict[str, TaskSection]) -> dict[str, TaskSection]:
    if not any(task.weight > 0 for task in tasks.values() if task.eval_of is None):
        raise ValueError("no training task has a weight above 0: there is nothing to train on")
    return tasks


Tasks = Annotated[
    dict[Name, TaskSection],
    BeforeValidator(inherit_held_out),
    Field(min_length=1),
    AfterValidator(_some_task_trains),
]
"""All [tasks.<name>] of a config, with evaluation tasks completed from their training tasks."""


def attached_kinds(tasks: Mapping[str, TaskSection]) -> list[type[AttachedJudge]]:
    """Return the kinds of judges that packages have attached to some task."""
    return list(
        dict.fromkeys(type(each) for task in tasks.values() for each in task.attached.values())
    )
