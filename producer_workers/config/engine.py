"""[engine]: the inference engine of a worker, one section per kind.

Invariant: a value that is left out means "the default of this machine", and only `vllm_arguments`
fills it in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from buffer.config.section import YEAR_S, Count, Section
from producer_workers.config.distributions import Distribution, Fixed, LogNormal

# The engine's guarantees (ids in, logprobs as sampled, versions per token) depend on these.
OWNED_ARGUMENTS = frozenset(
    {"model", "tokenizer", "skip_tokenizer_init", "logprobs_mode", "worker_extension_cls"}
    | {"enable_return_routed_experts", "enable_lora", "max_lora_rank", "max_loras"}
    | {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
)


class EngineSettings(Section):
    """The settings that every engine has."""

    restarts: Count = Field(3, ge=0)
    """engines that may replace dead ones; the death of one that ran for 10 minutes is not counted
    """

    @property
    def shards(self) -> int:
        """Return the number of processes, with a device each, that hold weights or a part."""
        return 1

    @property
    def wants_adapters(self) -> bool:
        """Return whether the engine loads LoRA adapters in place of whole weights."""
        return False


class VllmConfig(EngineSettings):
    """[engine] kind = "vllm": a vLLM engine.

    Defaults on a CPU build: float32, eager mode, 64 sequences and 1 GiB of KV cache. On CUDA: the
    model's dtype, compiled, 256 sequences and vLLM's own share of the GPU memory.
    """

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

    @property
    def wants_adapters(self) -> bool:
        """Return whether the engine loads LoRA adapters."""
        return self.max_lora_rank is not None


class HttpConfig(EngineSettings):
    """[engine] kind = "http": a server of the OpenAI API that returns token ids.

    Each server needs a worker of its own.
    """

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
    control_timeout_s: float = Field(60.0, gt=0, le=YEAR_S)
    """time limit of a pause or resume"""
    load_timeout_s: float = Field(600.0, gt=0, le=YEAR_S)
    """time limit of a weight update"""

    @model_validator(mode="before")
    @classmethod
    def _records_no_experts(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and "routed_experts" in settings:
            raise ValueError(
                "routed_experts: vLLM's server reports experts only in whole answers, and this "
                "engine reads a stream; use kind vllm or transformers"
            )
        return settings

    @property
    def wants_adapters(self) -> bool:
        """Return whether the server loads LoRA adapters."""
        return self.weights == "adapters"


class TransformersConfig(EngineSettings):
    """[engine] kind = "transformers": a small model in the worker's own process.

    For machines on which vLLM does not run, and for comparisons with it.
    """

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


class SimulatedConfig(EngineSettings):
    """[engine] kind = "simulated": random tokens at simulated speed, without any model.

    For load tests and capacity planning.
    """

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
    trace: Path | None = None
    """JSONL file of requests whose lengths and durations are repeated (TracedRequest); default:
    they are drawn from the distributions above
    """
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


EngineConfig = Annotated[
    VllmConfig | HttpConfig | TransformersConfig | SimulatedConfig, Field(discriminator="kind")
]
"""All kinds of engines. To add one, add its section here and make it in
`producer_workers/engines/__init__.py`.
"""
