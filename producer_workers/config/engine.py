"""[engine]: the inference engine of a worker, one section per kind.

A section is also the registry entry of its kind: it names what builds the engine, and tells checks
and the launcher its GPUs, memory and packages, so that no other file branches on kinds.

Invariant: a value that is left out means "the default of this machine", and only the engine fills
it in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator

from buffer.config.attached import AttachedKinds
from buffer.config.section import YEAR_S, Count, DottedPath, Section
from producer_workers.config.call_limit import LimitSection
from producer_workers.config.distribution import Distribution, Fixed, LogNormal

# The engine's guarantees (ids in, logprobs as sampled, versions per token) depend on these.
OWNED_ARGUMENTS = frozenset(
    {"model", "tokenizer", "skip_tokenizer_init", "logprobs_mode", "worker_extension_cls"}
    | {"enable_return_routed_experts", "return_sampling_mask"}
    | {"enable_lora", "max_lora_rank", "max_loras"}
    | {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
)

NO_ADAPTERS = "[engine] loads adapters, but none are published: add [learner.lora]"


class GpuMemory(NamedTuple):
    """What an engine keeps on a GPU."""

    value_bytes: int
    """bytes of a number of the weights and of the cache"""
    parts: int
    """GPUs that share one copy of the model"""
    cache_bytes: int | None
    """size of the KV cache; None: the engine measures how much is free"""
    share: float | None
    """share of the GPU's memory that the engine takes; None: its default"""


class EngineSettings(Section):
    """The settings that every engine has."""

    built_by: ClassVar[str]
    """module:name of its class or factory, called with (section, model folder, version)"""
    package: ClassVar[str] = ""
    """the package that the engine needs"""
    loads_model: ClassVar[bool] = True
    """whether it reads the model's folder itself, and with it the length of its context"""
    has_masks: ClassVar[bool] = False
    """whether it can record what each token was sampled from, by its setting `sampling_mask`"""

    kind: str
    """the kind of engine, a literal in the section of each"""
    restarts: Count = Field(3, ge=0)
    """engines that may replace dead ones; the death of one that ran for 10 minutes is not counted
    """

    @property
    def shards(self) -> int:
        """Return the number of processes, with a device each, that hold weights or a part."""
        return 1

    def rules(self, config: Any) -> Iterator[str]:
        """Yield where these values contradict another section of the config."""
        yield from ()

    @property
    def gpu_memory(self) -> GpuMemory | None:
        """Return what the engine keeps on each GPU; None where that is not known."""
        return None

    @property
    def token_ids(self) -> Mapping[str, int]:
        """Return how many token ids the model must have, by the key that demands them."""
        return {}

    def reporting_load(self) -> Self:
        """Return settings with which the engine reports its load, if it can."""
        return self

    def recording_masks(self) -> Self:
        """Return settings with which the engine records sampling masks, if it can."""
        return self.model_copy(update={"sampling_mask": True}) if self.has_masks else self

    def for_scoring(self, top_k: int) -> Self:
        """Return the settings of an engine that only scores texts, with weights that stay."""
        return self


class VllmConfig(EngineSettings):
    """[engine] kind = "vllm": a vLLM engine.

    Defaults on a CPU build: float32, eager mode, 64 sequences and 1 GiB of KV cache. On CUDA: the
    model's dtype, compiled, 256 sequences and vLLM's own share of the GPU memory.
    """

    built_by = "producer_workers.engines.vllm.engine:VllmEngine"
    package = "vllm"
    has_masks = True

    kind: Literal["vllm"] = "vllm"
    """the kind of engine"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """number format of the weights; default: see above"""
    max_model_len: Count | None = Field(None, ge=2)
    """largest number of tokens of prompt and response; default: the model's"""
    max_num_seqs: Count | None = Field(None, ge=1)
    """sequences in one forward pass, further ones wait; default: see above"""
    kv_cache_memory_bytes: int | None = Field(None, ge=1 << 20, le=1 << 50)
    """size of the KV cache; default: see above"""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """share of the GPU memory that vLLM uses; default: vLLM's own"""
    tensor_parallel_size: int = Field(1, ge=1, le=1024)
    """processes that share each layer"""
    pipeline_parallel_size: int = Field(1, ge=1, le=1024)
    """stages into which the layers are divided"""
    data_parallel_size: int = Field(1, ge=1, le=1024)
    """replicas of these stages, which share the requests"""
    enforce_eager: bool | None = None
    """run without compilation and CUDA graphs; default: see above"""
    enable_sleep_mode: bool = False
    """allow the engine to free its GPU memory while the run is paused; CUDA only"""
    omp_threads: int | None = Field(None, ge=1, le=4096)
    """CPU threads; set 1 where engines share a machine; default: vLLM's own"""
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256] | None = None
    """sample with a published LoRA adapter of at most this rank; default: whole weights are
    published
    """
    prefix_cache: Literal["keep", "clear"] | None = None
    """the KV cache of requests that run while weights change. keep: they continue with it. clear:
    they are prefilled again with the new weights. New requests never reuse a cache of older
    weights. Default: keep; clear for a model that reads images
    """
    routed_experts: bool = False
    """record the experts that a mixture of experts chose for each token"""
    sampling_mask: bool = False
    """record which tokens each token was sampled from; set where a training task cuts some off with
    top_p and the like. CUDA only
    """
    report_load: bool = False
    """report how full the engine is; [worker] concurrency = "auto" sets it"""
    control_timeout_s: float = Field(60.0, gt=0, le=YEAR_S)
    """time limit of a pause, resume or abort"""
    load_timeout_s: float = Field(600.0, gt=0, le=YEAR_S)
    """time limit of a weight update, of sleeping and of waking up"""
    hang_timeout_s: float = Field(300.0, gt=0, le=YEAR_S)
    """an engine without progress for this time counts as dead; must exceed the longest forward pass
    """
    extra_args: dict[str, Any] = Field(default_factory=dict)
    """further arguments of vLLM's AsyncEngineArgs"""

    @field_validator("extra_args")
    @classmethod
    def _leaves_owned_arguments_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(OWNED_ARGUMENTS & value.keys()):
            raise ValueError(
                f"extra_args may not set {', '.join(taken)}: the worker sets them, "
                "and takes sizes from [engine]"
            )
        return value

    @property
    def shards(self) -> int:
        """Return the product of the three parallel sizes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def rules(self, config: Any) -> Iterator[str]:
        # vLLM ends with an error where free memory changes while it measures what a cache may have
        if config.trainer.flow == "colocated" and self.kv_cache_memory_bytes is None:
            yield (
                "[trainer] flow = colocated needs [engine] kv_cache_memory_bytes: while vLLM "
                "measures the free memory of the GPU, the trainer must not use or free any"
            )
        lora = config.learner.lora
        if lora and (self.max_lora_rank or 0) < lora.rank:
            yield f"[learner.lora] rank = {lora.rank} needs [engine] max_lora_rank of at least that"
        # a trainer of the user's own may publish adapters
        if self.max_lora_rank is not None and not lora and config.trainer.loop is None:
            yield f"{NO_ADAPTERS}, or leave out [engine] max_lora_rank"
        trained = [task for task in config.tasks.values() if task.eval_of is None]
        is_cut = any(task.sample.to_params().changes() for task in trained)
        # vLLM records masks of all requests, or of none
        if self.sampling_mask or (is_cut and not config.learner.allow_truncated_sampling):
            for name, task in config.tasks.items():
                if task.sample.temperature and not task.sample.to_params().always_cuts():
                    yield (
                        f"task {name} is sampled from the whole vocabulary, and vLLM then records "
                        "the whole vocabulary for each of its tokens, as it records what top_p and "
                        f"the like left of other tasks: set sample.top_k of task {name}, such as "
                        "1000"
                    )

    @property
    def gpu_memory(self) -> GpuMemory:
        width = 4 if self.dtype == "float32" else 2
        parts = self.tensor_parallel_size * self.pipeline_parallel_size
        return GpuMemory(width, parts, self.kv_cache_memory_bytes, self.gpu_memory_utilization)

    def reporting_load(self) -> Self:
        return self.model_copy(update={"report_load": True})

    def for_scoring(self, top_k: int) -> Self:
        extra = {
            # vLLM makes the logits of all tokens of a step at once: 1.2 GB for 2,048 of Qwen's
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": max(2048, self.max_num_seqs or 0),
            **self.extra_args,
            "max_logprobs": max(top_k, 20, self.extra_args.get("max_logprobs", 0)),
        }
        return self.model_copy(
            update={
                # vLLM makes a token more than the text has
                "max_model_len": self.max_model_len and self.max_model_len + 1,
                "max_lora_rank": None,
                "routed_experts": False,
                "sampling_mask": False,
                "extra_args": extra,
            }
        )


class HttpConfig(EngineSettings):
    """[engine] kind = "http": a server of the OpenAI API that returns token ids.

    Each server needs a worker of its own.
    """

    built_by = "producer_workers.engines.http.engine:HttpEngine"
    package = "aiohttp"
    loads_model = False

    kind: Literal["http"] = "http"
    """the kind of engine"""
    url: str = Field(pattern=r"^https?://")
    """URL of the server, without /v1"""
    model: str | None = None
    """the server's name of the model; default: the first that it serves"""
    api_key: str | None = Field(None, repr=False)
    """key that the server demands; default: none"""
    weights: Literal["update", "adapters", "static"] = "update"
    """update: the server loads whole weights. adapters: it loads LoRA adapters. static: it loads
    nothing, so only rollouts of the run's first weights can be made
    """
    limit: LimitSection | None = None
    """quota of the server's completions, for all workers together: { requests_per_minute,
    tokens_per_minute, at_once }; default: none
    """
    control_timeout_s: float = Field(60.0, gt=0, le=YEAR_S)
    """time limit of a pause or resume"""
    load_timeout_s: float = Field(600.0, gt=0, le=YEAR_S)
    """time limit of a weight update"""

    def rules(self, config: Any) -> Iterator[str]:
        wants_adapters = self.weights == "adapters"
        if config.learner.lora and not wants_adapters:
            yield '[learner.lora] needs [engine] weights = "adapters"'
        if wants_adapters and not config.learner.lora and config.trainer.loop is None:
            yield f"{NO_ADAPTERS}, or leave out [engine] weights"


class TransformersConfig(EngineSettings):
    """[engine] kind = "transformers": a small model in the worker's own process.

    For machines on which vLLM does not run, and for comparisons with it.
    """

    built_by = "producer_workers.engines.hf.engine:TransformersEngine"
    package = "transformers"
    has_masks = True

    kind: Literal["transformers"] = "transformers"
    """the kind of engine"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """number format of the weights"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the model; auto: CUDA where there is some"""
    max_num_seqs: Count = Field(16, ge=1)
    """requests that get a token in each round; further ones wait"""
    routed_experts: bool = False
    """record the experts that a mixture of experts chose for each token"""
    sampling_mask: bool = False
    """record which tokens each token was sampled from; set where a training task cuts some off with
    top_p and the like
    """


class SimulatedConfig(EngineSettings):
    """[engine] kind = "simulated": random tokens at simulated speed, without any model.

    For load tests and capacity planning.
    """

    built_by = "producer_workers.engines.simulated:build"
    loads_model = False

    kind: Literal["simulated"] = "simulated"
    """the kind of engine"""
    seed: int = Field(0, ge=0, lt=2**32)
    """seed of lengths, durations and tokens"""
    response_tokens: Distribution = LogNormal(median=256, sigma=0.6)
    """length of a response"""
    first_token_s: Distribution = Fixed(value=0.05)
    """seconds until the first token"""
    token_s: Distribution = Fixed(value=0.01)
    """seconds for each further token"""
    load_weights_s: float = Field(0.0, ge=0, le=YEAR_S)
    """seconds for a weight update"""
    max_model_len: Count | None = Field(None, ge=2)
    """largest number of tokens of prompt and response; default: no limit"""
    max_num_seqs: Count = Field(256, ge=1)
    """requests at the same time; further ones wait"""
    vocab_size: Count | None = Field(None, ge=2)
    """number of different token ids; default: those of the model, or 32,000 without one"""
    eos_token_id: Count | None = Field(None, ge=0)
    """token that ends a response; default: that of the model, or 0 without one"""
    fail_every: Count | None = Field(None, ge=1)
    """every n-th request raises GenerationError; default: none"""
    die_after: Count | None = Field(None, ge=0)
    """the engine dies at the request after this many; default: never"""

    @property
    def token_ids(self) -> Mapping[str, int]:
        ends = 0 if self.eos_token_id is None else self.eos_token_id + 1
        return {"vocab_size": self.vocab_size or 0, "eos_token_id": ends}


class PythonConfig(EngineSettings):
    """[engine] kind = "python": an engine of yours."""

    built_by = "producer_workers.engines:build_yours"
    loads_model = False

    kind: Literal["python"] = "python"
    """the kind of engine"""
    factory: DottedPath
    """a class or function of yours as package.module:name, called with this section, the model's
    folder and the version of its weights, that returns an engine (producer_workers/engines/base.py)
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """values for the factory, which gets this section"""


EngineConfig = Annotated[
    EngineSettings,
    AttachedKinds(
        "rolloutmq.engines",
        (VllmConfig, HttpConfig, TransformersConfig, SimulatedConfig, PythonConfig),
    ),
]
"""Any kind of engine: these, and those that packages attach."""
