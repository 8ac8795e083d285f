"""The config sections both sides share: [run] [redis] [lease] [policy] [tasks].

The models of the two sides put these together with sections of their own. Paths are relative to
where the command is started. Names and defaults are XTuner's where the thing is the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from buffer.config.dataset import DatasetSection
from buffer.config.loader import Section
from buffer.config.strategy import StrategySection
from buffer.model.dotted_path import is_dotted_path
from buffer.model.order_policy import BUILT_IN as ORDERS
from buffer.model.rollout import SampleParams, StructuredOutput
from buffer.model.staleness import stale_threshold
from buffer.store.url import SCHEMES, mask_url
from buffer.weights.registry import TransportName


def check_name(name: str) -> str:
    """Runs and tasks name Redis keys and folders: no slashes, braces, colons or leading dots."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ValueError(
            "expected letters, digits, `_ . -`; first a letter or digit; at most 64 characters"
        )
    return name


Name = Annotated[str, AfterValidator(check_name)]

JUDGES = ("reasoning_gym", "exact_match", "gsm8k", "math_verify", "python_tests")
"""Judges that are told by name; `producer_workers.judges.load` has their functions."""

NO_JUDGE = "environment"
"""Stands for none: the environment of a loop, or the agent of a gateway, gives the reward."""

UNSAFE_JUDGES = frozenset({"math_verify", "python_tests"})
"""Those that may take for ever, or that run what a model wrote: only in processes of their own."""

JudgeSpec = str | dict[str, str | dict[str, float]]
"""A judge; or judges by pattern of the data source, each one judge or several with weights."""


def is_url(judge: str) -> bool:
    return judge.startswith(("http://", "https://"))


HELD_OUT = "held_out"
"""The split of a training task's data set that its `eval_of` task asks for."""


class RunSection(Section):
    """[run]: which run this is."""

    name: Name
    """name of the run: letters, digits, `_ . -`, at most 64; part of every Redis key"""
    dir: Path | None = None
    """folder of the run's server, checkpoints, weights and logs; default: runs/<name>"""
    media: Path | None = None
    """folder of this run alone, seen by all processes, for files that payloads refer to as
    run://GID/NAME: they are saved with the run and deleted with their groups; default: none
    """
    seed: int = Field(0, ge=0, lt=2**32)
    """seed of model, data order and sampling"""

    @property
    def folder(self) -> Path:
        return self.dir or Path("runs") / self.name


class RedisSection(Section):
    """[redis]: the server. With no URL anywhere, the run starts an embedded Valkey of its own."""

    url: str | None = Field(None, repr=False)
    """redis://, rediss:// or unix:// URL, of any node of a cluster; REDIS_URL beats it, --redis-url
    both
    """
    deadline_s: float = Field(60.0, gt=0)
    """how long one operation is tried again before it fails; trainer, producer and workers wait on
    until they are stopped
    """
    wait_replicas: int = Field(0, ge=0)
    """replicas that must have a submit, take or commit before it counts: what is answered survives
    a failover
    """
    allow_unsafe: bool = False
    """go on although the server's settings could lose data"""

    @field_validator("url")
    @classmethod
    def _check_scheme(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).scheme not in SCHEMES:
            raise ValueError(
                "expected a URL that starts with redis://, rediss://, unix:// or redis+sentinel://"
            )
        return url

    def resolve_url(self, flag: str | None = None) -> str | None:
        """`--redis-url`, else REDIS_URL, else this section's, else None (embedded server)."""
        return flag or os.environ.get("REDIS_URL") or self.url or None

    def __str__(self) -> str:
        return f"redis {mask_url(self.url) if self.url else '(embedded)'}"


class LeaseSection(Section):
    """[lease]: how long a worker may hold a group without a sign of life, and how often a group is
    tried.
    """

    lease_ms: int = Field(10_000, ge=300)
    """a group whose worker was silent for so long goes back to the queue"""
    heartbeat_ms: int = Field(2_000, ge=50)
    """time between two signs of life; at most a third of lease_ms"""
    max_tries: int = Field(3, ge=1)
    """after so many failed or lost tries a group is a dead letter"""
    pause_timeout_s: float = Field(300.0, gt=0)
    """a worker that does not confirm a pause in this time is fenced, and its groups are queued
    again
    """
    worker_timeout_ms: int = Field(
        default_factory=lambda data: 3 * int(data.get("lease_ms", 10_000)), ge=300
    )
    """a worker that was silent for so long counts as gone; default: 3 * lease_ms"""

    @model_validator(mode="after")
    def _check_heartbeat(self) -> LeaseSection:
        if self.heartbeat_ms * 3 > self.lease_ms:
            raise ValueError(
                f"heartbeat_ms = {self.heartbeat_ms} must be at most a third of lease_ms = {self.lease_ms}: "
                "two lost heartbeats must not cost a lease"
            )
        return self


class PolicySection(Section):
    """[policy]: the model that is trained, and how far rollouts may lag behind it."""

    model: Path | None = None
    """Hugging Face model folder to start from; default: the run makes a small one"""
    weights_dir: Path | None = None
    """folder in which each run has one to share its weights through; default: <run folder>/weights"""
    weights_transport: TransportName = "folder"
    """how weights reach workers: through that folder; in chunks through Redis (small models; memory
    on top of [memory]); or from the trainer's memory to the engines' processes over gloo or nccl,
    with the folder behind it
    """
    weights_host: str | None = None
    """gloo, nccl: the trainer's address for workers, which connect to any port of it; default: the
    one from which it reaches the Redis server
    """
    sync_weights_interval: int = Field(1, ge=1)
    """train steps between two publications of weights"""
    max_staleness: int = Field(0, ge=0)
    """how many publications old the weights of a rollout may be; 0 is on-policy"""
    max_token_staleness: int | None = Field(None, ge=0)
    """the same for single tokens, at most as many: older ones are not trained, and a rollout with
    no other ones expires its group; unset: all tokens of a group are trained
    """
    order: str = "staleness"
    """which ready groups are taken first: staleness (oldest weights), fifo (arrival), freshest
    (newest weights), length_fair (short and long responses take turns), or your own function as
    package.module:function
    """
    pause_mode: Literal["abort", "drain", "keep"] = "keep"
    """what a weight update does to running rollouts: hand back what they have, finish, or freeze
    and go on
    """

    @field_validator("order")
    @classmethod
    def _check_order(cls, order: str) -> str:
        if order not in ORDERS and not is_dotted_path(order):
            raise ValueError(f"expected {', '.join(ORDERS)} or package.module:function")
        return order

    @field_validator("max_token_staleness")
    @classmethod
    def _check_tokens(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        groups = info.data.get("max_staleness", 0)
        if tokens is not None and tokens > groups:
            raise ValueError(
                f"expected at most max_staleness = {groups}: a group expires with its oldest token"
            )
        return tokens

    @property
    def stale_threshold(self) -> int:
        """Staleness, in train steps, from which a group is expired (design section 9)."""
        return stale_threshold(self.max_staleness, self.sync_weights_interval)

    @property
    def token_threshold(self) -> int | None:
        """Staleness, in train steps, from which a token is not trained; None: all are."""
        if self.max_token_staleness is None:
            return None
        return stale_threshold(self.max_token_staleness, self.sync_weights_interval)

    def weights_folder(self, run: RunSection) -> Path:
        # a folder per run: each deletes its own old versions
        return self.weights_dir / run.name if self.weights_dir else run.folder / "weights"


class SampleParamsSection(Section):
    """[tasks.<name>.sample]: how responses are sampled."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus; 1 is off"""
    top_k: int = Field(0, ge=0)
    """only the k likeliest tokens; 0 is off"""
    max_tokens: int = Field(2048, ge=1)
    """longest response, in tokens"""
    min_tokens: int = Field(0, ge=0)
    """no end of text before so many tokens. As with top_p, top_k and structured: logprobs are those
    of the tokens that were allowed, and a trainer's of all, so that the mismatch grows
    """
    stops: list[str] = Field(default_factory=list)
    """strings that end a response"""
    stop_token_ids: list[int] = Field(default_factory=list)
    """tokens that end a response"""
    seed: int | None = None
    """unset: the engine draws as it likes; set: every rollout gets a seed of its own, derived from
    this one, the run's, the group and its place, so that the same weights sample the same response
    again
    """

    structured: StructuredOutput | None = None
    """what a response must look like: {choice = [...]}, {regex = "..."} or {json_schema = {...}};
    engines vllm, http
    """

    @model_validator(mode="after")
    def _check_lengths(self) -> SampleParamsSection:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens = {self.min_tokens} is over max_tokens = {self.max_tokens}"
            )
        return self

    def to_params(self) -> SampleParams:
        return SampleParams(**self.model_dump())


class JudgingSection(Section):
    """[tasks.<name>.judging]: where the judge runs. The limits are those of rq jobs, timeout_s and
    retries of judges at a URL, too; any other inline judge has none.
    """

    kind: Literal["inline", "rq"] = "inline"
    """inline: in the rollout worker; rq: in a forked process of `rolloutmq judge`, for slow or
    unsafe judges
    """
    timeout_s: float = Field(60.0, gt=0)
    """a judge that takes longer is killed"""
    memory_mb: int = Field(4096, ge=256)
    """address space of the process that judges; beyond it Python raises MemoryError"""
    retries: int = Field(2, ge=0)
    """how often a judge that failed, was killed or lost is asked again before the rollout fails"""


def judge_names(spec: JudgeSpec) -> list[str]:
    """Every judge that a task names."""
    if isinstance(spec, str):
        return [spec]
    return [
        name
        for judges in spec.values()
        for name in ([judges] if isinstance(judges, str) else judges)
    ]


class TaskSection(Section):
    """[tasks.<name>]: one kind of problem. A run mixes its training tasks by weight."""

    weight: float = Field(1.0, ge=0)
    """share of this task in a batch, relative to the others"""
    prompt_repeat_k: int = Field(8, ge=1)
    """rollouts per prompt: the size of a group"""
    sample: SampleParamsSection = SampleParamsSection()
    """how responses are sampled"""
    dataset: DatasetSection
    """where prompts come from"""
    judge: JudgeSpec
    """what scores a response: reasoning_gym, exact_match, gsm8k, math_verify, python_tests, your
    own function as package.module:function, a URL; or judges by data source, each one or several
    with weights
    """
    judging: JudgingSection = JudgingSection()
    """where it runs, and what it may take"""
    eval_of: str | None = None
    """evaluation only: the training task whose held-out problems are asked, greedily and once each"""
    shuffle: bool = True
    """a new order of the prompts in every epoch"""
    agent_loop: str | None = None
    """how a group of this task is generated; default: [worker] agent_loop"""
    agent_loop_options: dict[str, Any] = Field(default_factory=dict)
    """what that loop is made with, for example tools = ["my_tools:search"], max_turns = 4"""
    strategy: StrategySection | None = None
    """[strategy] of this task alone; what it leaves out is as there"""

    @field_validator("judge")
    @classmethod
    def _check_judge(cls, judge: JudgeSpec) -> JudgeSpec:
        for name in judge_names(judge):
            if (
                name not in JUDGES
                and not is_dotted_path(name)
                and not is_url(name)
                and judge != NO_JUDGE
            ):
                known = ", ".join((*JUDGES, NO_JUDGE))
                raise ValueError(
                    f"expected {known}, package.module:function or a URL, not {name!r}"
                )
        return judge

    @model_validator(mode="after")
    def _check_judging(self) -> TaskSection:
        if self.judging.kind == "inline" and (unsafe := UNSAFE_JUDGES & set(self.judges)):
            raise ValueError(
                f'judge {", ".join(unsafe)} needs a process of its own: judging = {{ kind = "rq" }}'
            )
        return self

    @property
    def judges(self) -> list[str]:
        """The names of all judges of the task."""
        return [] if self.judge == NO_JUDGE else judge_names(self.judge)

    @property
    def lane(self) -> Literal["fresh", "eval"]:
        return "eval" if self.eval_of else "fresh"

    @property
    def split(self) -> str | None:
        """The split of the data set to read; None is the training split."""
        return HELD_OUT if self.eval_of else None


def inherit_held_out(tasks: Any) -> Any:
    """Fill in what an `eval_of` task leaves out: its training task's values; one greedy response."""
    if not isinstance(tasks, Mapping):
        return tasks
    return {name: _inherit(name, task, tasks) for name, task in tasks.items()}


def _inherit(name: str, task: Any, tasks: Mapping[str, Any]) -> Any:
    if not isinstance(task, Mapping) or not isinstance(eval_of := task.get("eval_of"), str):
        return task
    base = tasks.get(eval_of)
    if not isinstance(base, Mapping) or base.get("eval_of") is not None:
        training = [other for other, section in tasks.items() if "eval_of" not in section]
        raise ValueError(
            f'eval_of = "{eval_of}" of task {name} is not a training task; known: {", ".join(training)}'
        )
    sample = {**base.get("sample", {}), "temperature": 0.0, **task.get("sample", {})}
    return {**base, "weight": 0.0, "prompt_repeat_k": 1, "shuffle": False, **task, "sample": sample}


Tasks = Annotated[dict[Name, TaskSection], BeforeValidator(inherit_held_out), Field(min_length=1)]
"""All [tasks.<name>] of a config, with evaluation tasks completed from the tasks they belong to."""
