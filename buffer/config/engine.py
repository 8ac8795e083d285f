"""Settings of the engines: one pydantic union, told apart by `kind`.

Invariant: what is `None` here means "the default of this machine", which `vllm_arguments` alone
fills in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from buffer.model.distributions import Distribution, Fixed, LogNormal

# The engine's promises (ids in, logprobs as sampled, versions per token) hang on these.
OWNED_ARGUMENTS = frozenset(
    {"model", "tokenizer", "skip_tokenizer_init", "logprobs_mode", "worker_extension_cls"}
    | {"enable_return_routed_experts", "enable_lora", "max_lora_rank", "max_loras"}
    | {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
)


class EngineSettings(BaseModel):
    """What every engine has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    restarts: int = Field(
        3, ge=0, description="new engines after dead ones; one that lived 10 minutes is forgiven"
    )


class VllmConfig(EngineSettings):
    """A vLLM engine. Sizes in tokens unless the name has a unit.

    Defaults for None: on a CPU build float32, eager, 64 sequences and 1 GiB of KV cache; on CUDA
    the model's dtype, compiled, 256 sequences and vLLM's own share of GPU memory.
    """

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    max_model_len: int | None = Field(
        None, ge=2, description="prompt + response; None: the model's"
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="in one forward pass; more wait in line"
    )
    kv_cache_memory_bytes: int | None = Field(None, ge=1 << 20)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    tensor_parallel_size: int = Field(1, ge=1, description="processes that share each layer")
    pipeline_parallel_size: int = Field(
        1, ge=1, description="stages that the layers are dealt out to"
    )
    data_parallel_size: int = Field(
        1, ge=1, description="replicas of all that; requests are shared out among them"
    )
    enforce_eager: bool | None = None
    enable_sleep_mode: bool = Field(
        False, description="can give its GPU memory back while paused; CUDA only"
    )
    omp_threads: int | None = Field(
        None, ge=1, description="CPU threads; 1 where engines share a machine"
    )
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256] | None = Field(
        None,
        description="sample with a LoRA adapter of this rank at most: what is published are adapters, no weights",
    )
    routed_experts: bool = Field(
        False, description="hand in which experts a mixture of experts chose for each token"
    )
    report_load: bool = Field(
        False, description="look at how full it is; [worker] concurrency = 'auto' sets it"
    )
    control_timeout_s: float = Field(60.0, gt=0, description="pause, resume, abort")
    load_timeout_s: float = Field(600.0, gt=0, description="one weight update")
    hang_timeout_s: float = Field(
        300.0, gt=0, description="longer than any forward pass takes; silent so long is dead"
    )
    extra_args: dict[str, Any] = Field(
        default_factory=dict, description="more AsyncEngineArgs, as they are"
    )

    @field_validator("extra_args")
    @classmethod
    def _leaves_owned_arguments_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(OWNED_ARGUMENTS & value.keys()):
            raise ValueError(
                f"extra_args may not set {', '.join(taken)}: the worker sets them, sizes from [engine]"
            )
        return value

    @property
    def shards(self) -> int:
        """How many processes, with a device each, hold the weights or a part of them."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


class HttpConfig(EngineSettings):
    """A server of the OpenAI API that runs elsewhere and gives token ids; one worker to a server."""

    kind: Literal["http"] = "http"
    url: str = Field(pattern=r"^https?://", description="without /v1")
    model: str | None = Field(
        None, description="as the server names it; None: the first that it serves"
    )
    api_key: str | None = Field(None, repr=False)
    weights: Literal["update", "adapters", "static"] = Field(
        "update",
        description="update: whole weights are published; adapters: LoRA adapters are; static: nobody changes them, so "
        "only rollouts of the run's first weights can be made",
    )
    control_timeout_s: float = Field(60.0, gt=0, description="pause, resume")
    load_timeout_s: float = Field(600.0, gt=0, description="one weight update")

    @model_validator(mode="before")
    @classmethod
    def _records_no_experts(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and "routed_experts" in settings:
            why = "vLLM's server tells experts in whole answers, and this engine reads a stream"
            raise ValueError(f"routed_experts: {why}; kinds vllm and transformers record them")
        return settings


class TransformersConfig(EngineSettings):
    """A small model in the worker's own process, by transformers: where vLLM does not run, or to
    compare with it.
    """

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_num_seqs: int = Field(
        16, ge=1, description="requests that get a token in each round; more wait in line"
    )
    routed_experts: bool = Field(
        False, description="hand in which experts a mixture of experts chose for each token"
    )


class SimulatedConfig(EngineSettings):
    """No model at all: random tokens on a clock, for load tests and capacity planning."""

    kind: Literal["simulated"] = "simulated"
    seed: int = 0
    response_tokens: Distribution = LogNormal(median=256, sigma=0.6)
    first_token_s: Distribution = Fixed(value=0.05)
    token_s: Distribution = Fixed(value=0.01)
    trace: Path | None = Field(
        None, description="JSONL of requests to play again: request_trace.py"
    )
    load_weights_s: float = Field(0.0, ge=0)
    max_num_seqs: int = Field(256, ge=1)
    vocab_size: int = Field(32_000, ge=2)
    eos_token_id: int = Field(0, ge=0)
    fail_every: int | None = Field(
        None, ge=1, description="every n-th request raises GenerationError"
    )
    die_after: int | None = Field(
        None, ge=0, description="the engine dies at the request after so many"
    )


EngineConfig = Annotated[
    VllmConfig | HttpConfig | TransformersConfig | SimulatedConfig, Field(discriminator="kind")
]
