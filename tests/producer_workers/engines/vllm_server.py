"""A real vLLM server as a process, as somebody would start it for the engine of kind http."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[3]
ARGUMENTS = [
    *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
    *(
        "--max-num-seqs",
        "32",
        "--kv-cache-memory-bytes",
        "64M",
        "--logprobs-mode",
        "processed_logprobs",
    ),
    *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "1"),
    "--no-enable-chunked-prefill",  # see CPU_DEFAULTS in producer_workers/engines/vllm/api.py
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
    *("--worker-extension-cls", "producer_workers.engines.vllm.worker_extension.WeightLoader"),
]
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
START_S = 500.0


@contextmanager
def vllm_server(model: Path) -> Iterator[str]:
    """Start a server, yield its URL once it answers, and leave no process behind."""
    log = model.parent / "server.log"
    for _ in range(3):  # somebody may take the port before the server does
        process, url = _start(model, log)
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


def _start(model: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--port",
        str(port),
    ]
    with log.open("ab") as out:
        process = subprocess.Popen(
            command + ARGUMENTS,
            env=os.environ | SETTINGS,
            cwd=ROOT,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    return process, f"http://127.0.0.1:{port}"


def _is_up(process: subprocess.Popen[bytes], url: str) -> bool:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return True
        except OSError:
            time.sleep(0.2)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes that it has started, which share its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
