"""The parts of a GPU day: each is a process of its own, with a limit of time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.figure import Figure

SYNCHRONOUS = {"VLLM_USE_V2_MODEL_RUNNER": "0", "SYNCHRONOUS_SCHEDULING": "1"}
"""vLLM as on a CPU, which all tests have seen: its older model runner, one step after the other."""

COLOCATED = (
    "trainer.flow=colocated",
    "policy.pause_mode=abort",
    "strategy.kind=sync",
    "policy.max_staleness=0",
    "worker.sleep_when_paused=true",
    "engine.enable_sleep_mode=true",
)


@dataclass(frozen=True, slots=True)
class Part:
    """One part: figures that `measure` yields, or a command that must succeed."""

    name: str
    limit_s: float
    measure: Callable[[], Iterator[Figure]] | None = None
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    needs_vllm: bool = True


def parts(shapes: Sequence[str]) -> list[Part]:
    """Return the parts for models of these shapes, the most telling first."""
    first, *_ = shapes
    return [
        *(_trained(shape) for shape in shapes),
        Part("agreement", 180, lambda: _engine("logprob_agreement", first)),
        Part("masked agreement", 180, lambda: _engine("masked_agreement", first)),
        *(_stalled(shape) for shape in dict.fromkeys((first, shapes[-1]))),
        Part("throughput", 240, lambda: _engine("throughput", first)),
        Part("pipeline", 240, command=_check()),
        Part("colocated", 240, command=_check(*COLOCATED)),
        Part("colocated update", 180, lambda: _engine("colocated_update", first)),
        Part("conformance, synchronous", 300, command=CONFORMANCE, env=SYNCHRONOUS),
        Part("conformance, defaults", 300, command=CONFORMANCE),
        Part("sleep", 180, command=(*PYTEST, "tests/producer_workers/engines/test_vllm_sleep.py")),
    ]


PYTEST = (sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider")
CONFORMANCE = (*PYTEST, "-m", "vllm and not modes", "tests/producer_workers/engines")


def _trained(shape: str) -> Part:
    def measure() -> Iterator[Figure]:
        from benchmarks.gpu_day.train_steps import train_steps

        return train_steps(shape)

    return Part(f"train steps {shape}", 240, measure, needs_vllm=False)


def _stalled(shape: str) -> Part:
    return Part(f"weight update {shape}", 180, lambda: _engine("weight_stall", shape))


def _engine(name: str, shape: str) -> Iterator[Figure]:
    from benchmarks.gpu_day import engine_parts

    measured: Iterator[Figure] = getattr(engine_parts, name)(shape)
    return measured


def _check(*settings: str) -> Sequence[str]:
    overrides = [part for setting in settings for part in ("--set", setting)]
    return (sys.executable, "-m", "rolloutmq", "gpu-check", "--steps", "3", *overrides)
