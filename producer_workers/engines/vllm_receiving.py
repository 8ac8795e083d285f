"""How all processes of a vLLM engine receive weights, before any of them loads them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from buffer.weights.announcement import Announcement
from producer_workers.engines.base import WeightsError

FIRST_LOOK_S, LAST_LOOK_S = 0.002, 0.05
"""Waits before the processes are asked whether all is there; doubled each time. A look costs vLLM's loop a message."""

Call = Callable[..., Awaitable[list[Any]]]
"""A method of the worker extension by its name, in all processes: their answers."""


async def receive_weights(call: Call, announced: Announcement, limit_s: float) -> None:
    """Raises WeightsError, and keeps nothing, where one process has not all of it within `limit_s`."""
    await call("rolloutmq_receive_weights", announced.to_json().decode(), limit_s)
    try:
        async with asyncio.timeout(limit_s):
            await _wait_for_all(call, announced.label)
    except TimeoutError as error:
        await call("rolloutmq_forget_received")
        raise WeightsError(f"the weights {announced.label} did not come within {limit_s:g} s") from error
    except WeightsError:
        await call("rolloutmq_forget_received")
        raise


async def load_received(call: Call) -> None:
    """All processes at once, between two forward passes."""
    try:
        await call("rolloutmq_load_received")
    finally:
        await call("rolloutmq_forget_received")


async def _wait_for_all(call: Call, label: str) -> None:
    wait_s = FIRST_LOOK_S
    while set(said := await call("rolloutmq_has_received")) != {"yes"}:
        for process, answer in enumerate(said):
            if answer not in ("yes", "not yet"):
                raise WeightsError(f"the weights {label} did not reach process {process} of the engine: {answer}")
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LAST_LOOK_S)
