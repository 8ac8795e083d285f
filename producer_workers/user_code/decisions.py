"""Call the functions of a user that decide something for a producer or a submit, from threads.

order                [policy] order             Finished ──▶ score
should_continue_fn   [strategy]                 completed, wanted, progress ──▶ bool
curriculum           [plan]                     ProduceProgress ──▶ weights by task
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from buffer.control.progress import ProduceProgress, TaskProgress
from buffer.errors import UserCodeError
from buffer.groups.order_policy import Finished, OrderFunction
from producer_workers.user_code.border import Border, Rules
from producer_workers.user_code.process_function import BlockingCall, call_of

LIMIT_S = 30.0  # time for one decision: groups are not submitted, or not started, before it is made

MEMORY_MB = 4096


class OrderBorder(Border):
    def check(self, name: str, result: Any, *arguments: Any) -> float:
        return float(result)


class ContinueBorder(Border):
    def call(self, function: Any, *arguments: Any) -> Any:
        completed, wanted, progress = arguments
        return function(completed, wanted, progress=progress)

    def check(self, name: str, result: Any, *arguments: Any) -> bool:
        return bool(result)


class CurriculumBorder(Border):
    def check(self, name: str, result: Any, *arguments: Any) -> dict[str, float]:
        if not isinstance(result or {}, Mapping):
            raise UserCodeError(
                f"{name} returned {result!r:.80}", hint="return weights by task, or None"
            )
        return {str(task): float(weight) for task, weight in (result or {}).items()}


ORDER = OrderBorder(tuple[Finished])
CONTINUE = ContinueBorder(tuple[int, int, TaskProgress])
CURRICULUM = CurriculumBorder(tuple[ProduceProgress])


def order_call(spec: str, function: OrderFunction | None) -> OrderFunction | None:
    """Return what calls an order policy of a user; None for a built-in one."""
    return None if function is None else _decision("order policy", spec, function, "ORDER")


def curriculum_call(spec: str, function: Callable[..., Any]) -> BlockingCall:
    return _decision("curriculum", spec, function, "CURRICULUM")


def continue_call(spec: str, function: Callable[..., Any]) -> Callable[..., bool]:
    call = _decision("should_continue_fn", spec, function, "CONTINUE")

    def should_continue(completed: int, wanted: int, *, progress: TaskProgress) -> bool:
        return bool(call(completed, wanted, progress))

    return should_continue


def _decision(kind: str, spec: str, function: Callable[..., Any], border: str) -> BlockingCall:
    rules = Rules(
        what=f"{kind} {spec!r}", name=spec, limit_s=LIMIT_S, limit_key="", memory_mb=MEMORY_MB
    )
    return BlockingCall(call_of(function, f"{__name__}:{border}", rules, path=spec))
