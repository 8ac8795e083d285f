"""Fixtures that every test may use, and quiet defaults for the engines."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import redis.utils
from hypothesis import settings

from tests.servers import close_clients, redis_client, run_name, server, server_of
from tests.shared_processes import SharedProcessScheduling
from tests.thoroughness import QUICK, THOROUGH

# No network, no compiler warm-up, no thread pinning: tests share few cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

# A shell starts background jobs with SIGINT ignored, and every process of a test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with SIGHUP.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Every test says which server it means; the one of whoever runs the tests is none of their
# business.
os.environ.pop("REDIS_URL", None)

# Servers wait for their disk at each write, and a disk answers some hundred times per second:
# memory answers at once. No test takes the power away.
MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 4 << 30
if (
    MEMORY.is_dir()
    and shutil.disk_usage(MEMORY).free > ENOUGH_BYTES
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Tests start some hundred processes: each would compile this project again, which takes a third of
# its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# redis-py reads its own version from its package's metadata again for each connection.
redis.utils.get_lib_version = cache(redis.utils.get_lib_version)

# No test says how long something may take, and the machine is shared: what is slow once is no
# finding.
settings.register_profile("quick", QUICK)
settings.register_profile("thorough", THOROUGH)
settings.load_profile("quick")

# Until all tests are collected: imports make no garbage.
gc.disable()

TESTS = Path(__file__).parent
SHORT = ("rolloutmq/config", "buffer/weights", "producer_workers/datasets")
"""Rooms of tests that start no server, no engine and no judge's process."""
LONG = (
    "pipeline", "producer_workers/engines", "producer_workers/judges", "producer_workers/user_code",
    "rolloutmq",
)  # fmt: skip
"""Rooms of tests that start engines, whole runs or browsers, or that mostly wait."""

BEYOND_CORE = re.compile(
    r"^(?:from|import) (?:torch|transformers|tokenizers|safetensors|huggingface_hub|consumer\.grpo|"
    r"consumer\.handle\.torch_dataset|tests\.consumer\.(?:grpo|handle\.test_rollout_consumer))|"
    r"tokenizer: Any",
    re.M,
)
"""What tests of the core cannot import."""

__all__ = ["redis_client", "run_name", "server", "server_of"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="leave out files that need torch")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --core, leave out files that import torch or what belongs to it, also by another file."""
    if not config.getoption("--core") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if BEYOND_CORE.search(text) else None


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be switched off
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedProcessScheduling:
    return SharedProcessScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first and short ones last: at the end, a process waits for the last file of
    another.
    """
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    path = item.path.as_posix().removeprefix(f"{TESTS.as_posix()}/")
    return path.startswith(SHORT) - path.startswith(LONG)


def pytest_collection_finish() -> None:
    """Take all that was imported and collected, a million objects, out of garbage collection."""
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True)
def forget_user_modules() -> Iterator[None]:
    """What a test writes as a user's own file (`my_….py`, in its own folder) is not found by the
    next one.
    """
    path = [*sys.path]
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    close_clients()


@pytest.fixture(autouse=True)
def keep_signal_handlers() -> Iterator[None]:
    """`rolloutmq run` ends with its signals ignored, as all processes would be that start later."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
