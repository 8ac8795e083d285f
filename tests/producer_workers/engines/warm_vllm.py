"""Processes of vLLM for tests, forked from one process that has imported it.

A start takes two seconds of a processor instead of seven. Like a spawned process, each starts
without threads and with the environment of its parent; the processes that it starts are its own
children.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from itertools import pairwise
from multiprocessing import context, forkserver, get_context, util
from typing import Any
from unittest.mock import patch

import pytest

from producer_workers.engines.vllm import engine
from producer_workers.engines.vllm.api import VllmApi, is_cpu_build

# Not the worker extension: an import of it starts a thread, which a fork would lose.
PRELOADED = [
    __name__, "vllm.v1.engine.core", "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker", "vllm.lora.worker_manager",
    "vllm.entrypoints.launchers.api_server.entry", "compressed_tensors",
]  # fmt: skip
# Its own, since `multiprocessing` has one for all contexts: other tests preload something else.
_server: Any = forkserver.ForkServer()
_server.set_forkserver_preload(PRELOADED)


class WarmProcess(context.ForkServerProcess):
    """A process in which vLLM is imported already, as it is in those that it starts."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        is_warm = forkserver.get_inherited_fds() is not None
        server = forkserver if is_warm else _server
        with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            super().start()

    def run(self) -> None:
        # setproctitle finds the title by the environment that the process was started with
        import_module("setproctitle").getproctitle()
        os.environ.clear()
        os.environ.update(self.environment)
        _serve_children()
        _patch_vllm()
        queues: Any = import_module("vllm.distributed.device_communicators.shm_broadcast")
        queues.SpinCondition.record_read = _spin_briefly
        # a notification of an idle reader may get lost, which costs 5 s by default
        queues.SHM_READER_RECHECK_INTERVAL_MS = 100
        super().run()


def _serve_children() -> None:
    """Fork a server for the children of this process, before it has threads.

    vLLM finds and kills what hangs among its descendants.
    """
    forkserver.set_forkserver_preload([])
    with patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(_: bytes, command: list[str], kept: list[int]) -> int:
    """Run Python's command for a server in a fork of this process, with the files of an exec."""
    if pid := os.fork():
        return pid
    try:
        ends = [2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
        for before, after in pairwise(ends):
            os.closerange(before + 1, after)
        # the fork inherits its lock, which is held
        forkserver._forkserver.__init__()  # type: ignore[misc]
        exec(command[-1])
    finally:
        os._exit(0)


def _spin_briefly(queue: Any) -> None:
    """Poll for the next message for 20 ms: vLLM's processes keep a core busy for a second."""
    queue.last_read = time.monotonic()
    queue.busy_loop_s = 0.02


class _WarmContext(context.ForkServerContext):
    Process = WarmProcess


class _WarmContexts:
    """Replaces `multiprocessing` where vLLM asks it for a context."""

    @staticmethod
    def get_context(_: str) -> _WarmContext:
        return _WarmContext()


def _patch_vllm() -> None:
    uses: Any = import_module("vllm.utils.system_utils")
    uses.multiprocessing = _WarmContexts


def _warm_api() -> VllmApi:
    api = VllmApi()
    _patch_vllm()
    return api


def fork_engines(patched: pytest.MonkeyPatch) -> None:
    if is_cpu_build():
        patched.setattr(engine, "VllmApi", _warm_api)


def vllm_context() -> Any:
    """Return the context of a process that is to run vLLM itself."""
    return _WarmContext() if is_cpu_build() else get_context("spawn")
