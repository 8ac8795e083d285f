"""A real vLLM server as a process, as somebody would start it for the engine of kind http."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from producer_workers.config.engine import VllmConfig
from producer_workers.engines.vllm import OWNER_VARIABLE
from producer_workers.engines.vllm.api import is_cpu_build, prepare_environment
from tests.producer_workers.engines.warm_vllm import vllm_context

ARGUMENTS = [
    *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
    *(
        "--max-num-seqs", "32", "--kv-cache-memory-bytes", "64M", "--logprobs-mode",
        "processed_logprobs",
    ),
    "--no-enable-chunked-prefill",  # see CPU_DEFAULTS in producer_workers/engines/vllm/api.py
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
    *("--worker-extension-cls", "producer_workers.engines.vllm.worker_extension.WeightLoader"),
]  # fmt: skip
ADAPTERS = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "1"]
SETTINGS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
START_S = 500.0


@contextmanager
def vllm_server(model: Path, more: Sequence[str] = ADAPTERS) -> Iterator[str]:
    log = model.parent / "server.log"
    for _ in range(3):  # somebody may take the port before the server does
        process, url = _start(model, log, more)
        if _is_up(process, url):
            break
        _end(process)
    else:
        raise AssertionError(
            f"vLLM's server does not start:\n{log.read_text(errors='replace')[-3000:]}"
        )
    try:
        yield url
    finally:
        _end(process)


def _start(model: Path, log: Path, more: Sequence[str]) -> tuple[BaseProcess, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    prepare_environment(VllmConfig(omp_threads=1), on_cpu=is_cpu_build())
    arguments = ["--model", str(model), "--port", str(port), *ARGUMENTS, *more]
    process: BaseProcess = vllm_context().Process(target=_serve, args=(log, arguments))
    process.start()
    return process, f"http://127.0.0.1:{port}"


def _serve(log: Path, arguments: list[str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= SETTINGS | {OWNER_VARIABLE: str(os.getpid())}
    sys.argv = ["vllm", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _is_up(process: BaseProcess, url: str) -> bool:
    end = time.monotonic() + START_S
    while process.is_alive() and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return True
        except OSError:
            time.sleep(0.2)
    return False


def _end(process: BaseProcess) -> None:
    """End the server; the process of its engine ends with it, by the worker extension."""
    process.kill()
    process.join()
