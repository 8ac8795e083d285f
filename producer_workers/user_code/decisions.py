"""Calls the `should_continue_fn` of a user's strategy for the producer, from a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from buffer.control.progress import TaskProgress
from producer_workers.user_code.border import Border, Rules
from producer_workers.user_code.process_function import BlockingCall, call_of

LIMIT_S = 30.0  # no group is started before the decision is made

MEMORY_MB = 4096


class ContinueBorder(Border):
    def call(self, function: Any, *arguments: Any) -> Any:
        completed, wanted, progress = arguments
        return function(completed, wanted, progress=progress)

    def check(self, name: str, result: Any, *arguments: Any) -> bool:
        return bool(result)


CONTINUE = ContinueBorder(tuple[int, int, TaskProgress])


def continue_call(spec: str, function: Callable[..., Any]) -> Callable[..., bool]:
    what = f"should_continue_fn {spec!r}"
    rules = Rules(what=what, name=spec, limit_s=LIMIT_S, limit_key="", memory_mb=MEMORY_MB)
    call = BlockingCall(call_of(function, f"{__name__}:CONTINUE", rules, path=spec))

    def should_continue(completed: int, wanted: int, *, progress: TaskProgress) -> bool:
        return bool(call(completed, wanted, progress))

    return should_continue
