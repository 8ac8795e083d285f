"""vLLM's processes end with the worker that owns them; models of other shapes take new weights.

Engines of their own: the owner of the mixture of experts is killed afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest

from tests.producer_workers.engines.conformance import (
    NEXT,
    TOLERANCE,
    generate,
    sampling,
    worst_difference,
)
from tests.producer_workers.engines.conftest import CPU_ENGINE, Run, running
from tests.producer_workers.engines.tiny_model import reference_logprobs, write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, Any], Path]]:
    """Start a process whose engine, of a mixture of experts, loads one checkpoint, then a second.

    Yields the process, its report, and the second checkpoint.
    """
    root = tmp_path_factory.mktemp("experts")
    first, second = (
        write_tiny_model(root / str(seed), seed=seed, architecture="qwen3_moe") for seed in (1, 2)
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.producer_workers.engines.owner", str(first), str(second)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    yield process, orjson.loads(line), second
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_mixture_of_experts_runs_its_new_weights_after_an_update(
    owner: tuple[Any, dict[str, Any], Path],
) -> None:
    _, report, second = owner
    reference = reference_logprobs(second, [40, 41, 42], report["token_ids"])
    assert np.abs(np.array(report["logprobs"]) - np.array(reference)).max() < 2e-3


def test_a_tied_head_runs_its_new_weights_after_an_update(run: Run[Any], tmp_path: Path) -> None:
    first, second = (
        write_tiny_model(tmp_path / str(seed), seed=seed, tied=True) for seed in (1, 2)
    )
    with running(CPU_ENGINE, run, first) as engine:
        run(engine.load_weights(second, NEXT))
        made = run(generate(engine, sampling(50, seed=1)))
    assert worst_difference(second, made, 1.0) < TOLERANCE


def test_engine_processes_end_when_their_owner_is_killed(
    owner: tuple[Any, dict[str, Any], Path],
) -> None:
    process, report, _ = owner
    assert report["children"]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 400
    alive = report["children"]
    while alive and time.monotonic() < deadline:
        time.sleep(0.1)
        alive = [pid for pid in alive if psutil.pid_exists(pid)]
    assert not alive
