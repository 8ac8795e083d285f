"""Receiving weights in all processes of a vLLM engine, before any of them loads them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from buffer.weights.announcement import Announcement
from producer_workers.engines.base import WeightsError

FIRST_POLL_S, LAST_POLL_S = 0.002, 0.05
"""Waits between polls of the processes; doubled each time. A poll costs vLLM's loop one message."""

Call = Callable[..., Awaitable[list[Any]]]
"""Calls a method of the worker extension by name in all processes; returns their results."""


async def receive_weights(call: Call, announced: Announcement, limit_s: float) -> None:
    """Receive announced weights in every process.

    Raises WeightsError, and discards everything, unless all processes have all of it in `limit_s`.
    """
    await call("rolloutmq_receive_weights", announced.to_json().decode(), limit_s)
    try:
        async with asyncio.timeout(limit_s):
            await _wait_for_all(call, announced.label)
    except TimeoutError as error:
        await call("rolloutmq_forget_received")
        message = f"the weights {announced.label} did not arrive within {limit_s:g} s"
        raise WeightsError(message) from error
    except WeightsError:
        await call("rolloutmq_forget_received")
        raise


async def load_received(call: Call) -> None:
    """Load the received weights in all processes at once, between two forward passes."""
    try:
        await call("rolloutmq_load_received")
    finally:
        await call("rolloutmq_forget_received")


async def _wait_for_all(call: Call, label: str) -> None:
    wait_s = FIRST_POLL_S
    while True:
        answers = await call("rolloutmq_has_received")
        if set(answers) == {"yes"}:
            return
        for process, answer in enumerate(answers):
            if answer not in ("yes", "not yet"):
                problem = f"did not reach process {process} of the engine: {answer}"
                raise WeightsError(f"the weights {label} {problem}")
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LAST_POLL_S)
