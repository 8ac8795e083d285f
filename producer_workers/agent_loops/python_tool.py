"""A Python interpreter as a tool: tools = ["python"]. Each call is a program of its own in the sandbox."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from producer_workers.sandbox import Limits, run_python

_THREADS = ThreadPoolExecutor(16, thread_name_prefix="python")

LIMITS = Limits(time_s=10.0, memory_mb=1024)


async def python(code: str) -> str:
    """Run a Python program. Returns what it prints. Nothing is kept between two calls."""
    outcome = await asyncio.get_running_loop().run_in_executor(_THREADS, run_python, code, "", LIMITS)
    return outcome.describe()
